"""The committed code is what the .proto files give, and imports without them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tiermoe.proto import generate
from tiermoe.proto.generated import channel_pb2, services_pb2


def test_regeneration_changes_nothing() -> None:
    pytest.importorskip("grpc_tools")
    there = {path.name: path.read_text(encoding="utf-8") for path in generate.GENERATED.glob("*_pb2.*")}
    assert generate.generate() == there


def test_every_proto_file_is_generated() -> None:
    assert sorted(path.stem for path in generate.HERE.glob("*.proto")) == sorted(generate.NAMES)


def test_the_services() -> None:
    services = services_pb2.DESCRIPTOR.services_by_name
    assert sorted(services) == ["Channel", "ExpertCompute", "Matcher", "Store"]
    for service in services.values():
        if service.name != "Channel":
            (method,) = service.methods
            assert method.input_type.full_name == method.output_type.full_name == "tiermoe.v1.Frame"
    assert channel_pb2.Frame.DESCRIPTOR.fields_by_name["payload"].number == 10


def test_a_channel_needs_neither_ray_nor_torch_nor_grpc_to_be_imported() -> None:
    code = (
        "import sys, tiermoe.proto.peers, tiermoe.proto.server; "
        "print([m for m in ('ray', 'torch', 'transformers', 'grpc') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
