from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[DType]
    DTYPE_FLOAT32: _ClassVar[DType]
    DTYPE_FLOAT16: _ClassVar[DType]
    DTYPE_BFLOAT16: _ClassVar[DType]
    DTYPE_INT32: _ClassVar[DType]
    DTYPE_UINT8: _ClassVar[DType]
    DTYPE_INT64: _ClassVar[DType]

class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KIND_UNSPECIFIED: _ClassVar[Kind]
    KIND_ACKNOWLEDGED: _ClassVar[Kind]
    KIND_FAILURE: _ClassVar[Kind]
    KIND_EXPERT_BATCH: _ClassVar[Kind]
    KIND_EXPERT_RESULT: _ClassVar[Kind]
    KIND_PREFETCH_COMMAND: _ClassVar[Kind]
    KIND_CONTEXT: _ClassVar[Kind]
    KIND_HEALTH_REQUEST: _ClassVar[Kind]
    KIND_HEALTH_REPORT: _ClassVar[Kind]
    KIND_STORE_REQUEST: _ClassVar[Kind]
    KIND_STORE_REPLY: _ClassVar[Kind]
    KIND_FILE_REQUEST: _ClassVar[Kind]
    KIND_FILE_REPLY: _ClassVar[Kind]
    KIND_PLACEMENT_COMMAND: _ClassVar[Kind]
DTYPE_UNSPECIFIED: DType
DTYPE_FLOAT32: DType
DTYPE_FLOAT16: DType
DTYPE_BFLOAT16: DType
DTYPE_INT32: DType
DTYPE_UINT8: DType
DTYPE_INT64: DType
KIND_UNSPECIFIED: Kind
KIND_ACKNOWLEDGED: Kind
KIND_FAILURE: Kind
KIND_EXPERT_BATCH: Kind
KIND_EXPERT_RESULT: Kind
KIND_PREFETCH_COMMAND: Kind
KIND_CONTEXT: Kind
KIND_HEALTH_REQUEST: Kind
KIND_HEALTH_REPORT: Kind
KIND_STORE_REQUEST: Kind
KIND_STORE_REPLY: Kind
KIND_FILE_REQUEST: Kind
KIND_FILE_REPLY: Kind
KIND_PLACEMENT_COMMAND: Kind

class Tensor(_message.Message):
    __slots__ = ("dtype", "shape", "byte_length")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    BYTE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    dtype: DType
    shape: _containers.RepeatedScalarFieldContainer[int]
    byte_length: int
    def __init__(self, dtype: _Optional[_Union[DType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., byte_length: _Optional[int] = ...) -> None: ...

class Layout(_message.Message):
    __slots__ = ("tensors",)
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.RepeatedCompositeFieldContainer[Tensor]
    def __init__(self, tensors: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ...) -> None: ...

class Acknowledged(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Failure(_message.Message):
    __slots__ = ("kind", "what", "remedy")
    KIND_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    REMEDY_FIELD_NUMBER: _ClassVar[int]
    kind: str
    what: str
    remedy: str
    def __init__(self, kind: _Optional[str] = ..., what: _Optional[str] = ..., remedy: _Optional[str] = ...) -> None: ...

class ExpertBatch(_message.Message):
    __slots__ = ("layer", "activation", "decode")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    ACTIVATION_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    layer: int
    activation: str
    decode: bool
    def __init__(self, layer: _Optional[int] = ..., activation: _Optional[str] = ..., decode: _Optional[bool] = ...) -> None: ...

class ExpertResult(_message.Message):
    __slots__ = ("measured_s", "modelled_s", "paced_s")
    MEASURED_S_FIELD_NUMBER: _ClassVar[int]
    MODELLED_S_FIELD_NUMBER: _ClassVar[int]
    PACED_S_FIELD_NUMBER: _ClassVar[int]
    measured_s: float
    modelled_s: float
    paced_s: float
    def __init__(self, measured_s: _Optional[float] = ..., modelled_s: _Optional[float] = ..., paced_s: _Optional[float] = ...) -> None: ...

class PrefetchCommand(_message.Message):
    __slots__ = ("iteration", "layer", "hints", "mapped")
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    HINTS_FIELD_NUMBER: _ClassVar[int]
    MAPPED_FIELD_NUMBER: _ClassVar[int]
    iteration: int
    layer: int
    hints: int
    mapped: bool
    def __init__(self, iteration: _Optional[int] = ..., layer: _Optional[int] = ..., hints: _Optional[int] = ..., mapped: _Optional[bool] = ...) -> None: ...

class PlacementCommand(_message.Message):
    __slots__ = ("keep_others", "preload")
    KEEP_OTHERS_FIELD_NUMBER: _ClassVar[int]
    PRELOAD_FIELD_NUMBER: _ClassVar[int]
    keep_others: bool
    preload: bool
    def __init__(self, keep_others: _Optional[bool] = ..., preload: _Optional[bool] = ...) -> None: ...

class Context(_message.Message):
    __slots__ = ("iteration", "layer")
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    iteration: int
    layer: int
    def __init__(self, iteration: _Optional[int] = ..., layer: _Optional[int] = ...) -> None: ...

class HealthRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Detail(_message.Message):
    __slots__ = ("text", "integer", "real", "flag")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    INTEGER_FIELD_NUMBER: _ClassVar[int]
    REAL_FIELD_NUMBER: _ClassVar[int]
    FLAG_FIELD_NUMBER: _ClassVar[int]
    text: str
    integer: int
    real: float
    flag: bool
    def __init__(self, text: _Optional[str] = ..., integer: _Optional[int] = ..., real: _Optional[float] = ..., flag: _Optional[bool] = ...) -> None: ...

class HealthReport(_message.Message):
    __slots__ = ("role", "details")
    class DetailsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Detail
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Detail, _Mapping]] = ...) -> None: ...
    ROLE_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    role: str
    details: _containers.MessageMap[str, Detail]
    def __init__(self, role: _Optional[str] = ..., details: _Optional[_Mapping[str, Detail]] = ...) -> None: ...

class StoreRequest(_message.Message):
    __slots__ = ("layer", "first", "neurons")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    NEURONS_FIELD_NUMBER: _ClassVar[int]
    layer: int
    first: int
    neurons: int
    def __init__(self, layer: _Optional[int] = ..., first: _Optional[int] = ..., neurons: _Optional[int] = ...) -> None: ...

class StoreReply(_message.Message):
    __slots__ = ("layer", "names", "first")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    layer: int
    names: _containers.RepeatedScalarFieldContainer[str]
    first: int
    def __init__(self, layer: _Optional[int] = ..., names: _Optional[_Iterable[str]] = ..., first: _Optional[int] = ...) -> None: ...

class FileRequest(_message.Message):
    __slots__ = ("name", "offset", "length")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    name: str
    offset: int
    length: int
    def __init__(self, name: _Optional[str] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class FileReply(_message.Message):
    __slots__ = ("name", "offset", "size")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    name: str
    offset: int
    size: int
    def __init__(self, name: _Optional[str] = ..., offset: _Optional[int] = ..., size: _Optional[int] = ...) -> None: ...
