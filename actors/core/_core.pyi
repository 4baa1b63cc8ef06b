"""
Decides and accounts for the expert memory of one device (actors/core/core.hpp).
"""

from collections.abc import Callable, Sequence
from typing import Annotated

import numpy
import numpy.typing
from numpy.typing import NDArray
from typing_extensions import CapsuleType


def takes(kernels: CapsuleType) -> bool:
    """
    Whether a table of kernels (`_cpu.table`) is of a build with these layouts.
    """

def errors(broken: object, no_slot: object, failure: object, store: object) -> None:
    """The classes of what the core raises; the last two take a remedy, too."""

class Clock:
    def __init__(self) -> None: ...

    @property
    def now_s(self) -> float: ...

    @now_s.setter
    def now_s(self, arg: float, /) -> None: ...

    def __call__(self) -> float: ...

    def advance(self, seconds: float) -> None: ...

class Link:
    def close(self) -> None: ...

    @property
    def pending(self) -> int: ...

class VirtualLink(Link):
    def __init__(self, clock: Clock, copy_s: Callable[[int], float], late_s: float) -> None: ...

    def busy_s(self) -> float:
        """Seconds for which copies have been under way, up to now."""

    def compute(self, seconds: float, share: float) -> None:
        """
        The clock moves to the end of kernels that take so long alone, and go at `share` of their speed beside copies.
        """

class CarryingLink(VirtualLink):
    def __init__(self, clock: Clock, copy_s: Callable[[int], float], late_s: float, carrier: object) -> None: ...

class PythonLink(Link):
    def __init__(self, of: object) -> None: ...

class ThreadLink(Link):
    def __init__(self, bytes_per_s: float, latency_s: float) -> None: ...

    def place(self, homes: Sequence[Sequence[tuple[int, int]]], home_of: Sequence[int], position: Sequence[int], sources: Sequence[tuple[int, int, bool, int, int]], tensors: int) -> None: ...

    def hold(self, seconds: float) -> None: ...

class DiskLink(Link):
    """
    Reads experts from files past the page cache (actors/core/disk_link.hpp).
    """

    def __init__(self, files: Sequence[tuple[str, int, int, int]], threads: int) -> None:
        """
        files: of each its path, an open descriptor, the address at which it is mapped, and its bytes.
        """

    def place(self, homes: Sequence[Sequence[tuple[int, int]]], home_of: Sequence[int], position: Sequence[int], sources: Sequence[tuple[int, int, bool, int, int]], tensors: int) -> None: ...

    def measure(self, bytes: int) -> float:
        """Bytes per second of pieces at equal distances in all files."""

    @property
    def direct(self) -> bool:
        """Whether all files are read past the page cache, as far as known."""

    @property
    def counts(self) -> tuple:
        """Bytes read, in how many pieces, and the seconds of the longest."""

class Rule:
    """Changes a layer's routing before it is planned (rules.hpp)."""

    def keeps(self, ids: numpy.typing.NDArray[numpy.int64], here: numpy.typing.NDArray[numpy.uint8 | numpy.bool], vacant: int) -> bool:
        """
        Whether it is known without weights and probabilities that nothing changes.
        """

    def reroute(self, layer: int, ids: numpy.typing.NDArray[numpy.int64], weights: numpy.typing.NDArray[numpy.float32], probabilities: numpy.typing.NDArray[numpy.float32] | None, here: numpy.typing.NDArray[numpy.uint8 | numpy.bool], vacant: int, emptied: int, shard_of: numpy.typing.NDArray[numpy.int64] | None = None, filling: numpy.typing.NDArray[numpy.uint8 | numpy.bool] | None = None) -> tuple[Annotated[NDArray[numpy.int64], dict(shape=(None, None))], Annotated[NDArray[numpy.float32], dict(shape=(None, None))], int, int] | None:
        """
        ids and weights that run [T, K], pairs substituted and dropped; None: the routing stays. The arguments are those of
        `routing.Rerouting.reroute` and `routing.RerouteView`.

        Raises ValueError: an array has another layout, type or
        shape, an expert, layer or shard does not exist, or probabilities are missing.
        """

class BudgetRule(Rule):
    def __init__(self, min_top_k: int, renormalise: bool) -> None: ...

class MissRule(Rule):
    """
    Algorithm 1 of BuddyMoE with its gates, of all layers.

    buddies: of each layer ids int32 and similarity float32 [E, R]. options: rho, search, gamma, temperature, kappa, eta, reuse,
    drop, by_buddy, renormalise. taus: of each layer. beta: None: no distribution gate. adaptive: bytes of an expert, seconds of
    link and calls to remember, for betas that adapt in its place. draw: gives so many random numbers, float32, which stand for the
    router's probabilities.
    """

    def __init__(self, experts: int, buddies: Sequence[tuple[Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)]]], options: tuple[int | None, int | None, float | None, float, float, float, float, bool, bool, bool], taus: Sequence[float] | None, beta: float | None, adaptive: tuple[int, float, int] | None, draw: object | None) -> None: ...

    @property
    def link_bytes_per_s(self) -> float:
        """As measured, for betas that adapt."""

    @link_bytes_per_s.setter
    def link_bytes_per_s(self, arg: float, /) -> None: ...

class Importance:
    """
    The state of ActiveEvict's eviction, on arrays that are read and written in place.

    powers: of gamma [2 T]. values, predicted: u and p-hat [L, E]. picked, seen: the tokens of each layer [L, T, K], and how many there
    were [L]. resident, stamp: [L * E].
    """

    def __init__(self, alpha: float, powers: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)], values: Annotated[NDArray[numpy.float64], dict(shape=(None, None), order='C', device='cpu')], picked: Annotated[NDArray[numpy.int64], dict(shape=(None, None, None), order='C', device='cpu')], seen: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu')], predicted: Annotated[NDArray[numpy.float64], dict(shape=(None, None), order='C', device='cpu')], resident: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')], stamp: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu')]) -> None: ...

class PreEviction:
    """The release target of ActiveEvict, of all layers (pre_eviction.hpp)."""

    def __init__(self, state: Importance, threshold: float, most: int) -> None: ...

    def begin_forward(self, last_rows: Sequence[int]) -> None:
        """last_rows: of each sequence; empty: unknown."""

    def slots(self, layer: int, ids: numpy.typing.NDArray[numpy.int64], own: numpy.typing.NDArray[numpy.float32] | None, next: numpy.typing.NDArray[numpy.float32] | None, states: numpy.typing.NDArray[numpy.uint8 | numpy.bool]) -> int:
        """
        Slots that should be free for the layer behind this one.

        ids: [T, K] as picked. own, next: logits of the first layer's
        router, at that one, and of the next one's, but at the last [T, E]; None: unknown. states: of all experts [L * E].

        Raises ValueError: no such layer or expert, or arrays of other shapes.
        """

class Order:
    def tell(self) -> None:
        """
        Orders of Python hear of what has happened, which else comes before they are asked.
        """

class PythonOrder(Order):
    def __init__(self, policy: object, segments: int) -> None:
        """segments: how many the cache has."""

class NativeOrder(Order):
    """What a cache tells an order, and who leaves."""

    def admitted(self, key: int) -> None: ...

    def removed(self, key: int) -> None: ...

    def used(self, keys: Sequence[int]) -> None: ...

    def routed(self, keys: Sequence[int], counts: Sequence[int], tokens: int) -> None: ...

    @property
    def segments(self) -> int: ...

    @property
    def classes(self) -> int:
        """Of slots."""

    def victims(self, slot_class: int, count: int, may: Annotated[NDArray[numpy.uint8], dict(order='C', device='cpu', writable=False)]) -> list[int]:
        """
        Of the segments with slots of a class that may leave [segments] the first.
        """

class WholeOrder(NativeOrder):
    def __init__(self, kind: str, layers: int, experts: int, least: float = 0.0, growth: float = 1.0, probabilities: Annotated[NDArray[numpy.float64], dict(order='C', device='cpu', writable=False)] | None = None, told: Annotated[NDArray[numpy.int64], dict(order='C', device='cpu', writable=False)] | None = None, importance: Importance | None = None, rate: float = 0.0) -> None:
        """
        kind: lru, lru-sweep, lfu, expert-map, importance, worth or lcp. probabilities [keys], told [layers] and what the state of importance has are read in place.
        """

    def priority(self, key: int) -> float:
        """By which experts are ranked, the highest first."""

    def bind(self, share: int, worths: Annotated[NDArray[numpy.float64], dict(order='C', device='cpu', writable=False)]) -> None:
        """worths [keys] are read in place."""

    def prompt(self, uses: Annotated[NDArray[numpy.int64], dict(order='C', device='cpu')] | None) -> None:
        """uses [keys] are read, and added to, in place."""

    def refuse(self, key: int) -> None: ...

    def admit(self, key: int) -> None: ...

    @property
    def refused(self) -> list[int]: ...

    @property
    def layer(self) -> int:
        """The layer at work."""

    @layer.setter
    def layer(self, arg: int, /) -> None: ...

    def settled(self) -> list[int]: ...

    def note(self) -> None: ...

    def noted(self) -> list:
        """
        (layer, int32 experts) of what was used since `note`, layers in rising order.
        """

class ByClass(NativeOrder):
    def __init__(self, layers: int, experts: int, split: bool, members: Sequence[Order]) -> None:
        """
        members: orders of the tops of each layer and of bottoms, if split; else of whole experts and of replicas. Each
        numbers its segments from 0.
        """

class Layout:
    def __init__(self, layers: int, experts: int, parts: int, class_of: Sequence[int], slots: Sequence[int], units: Sequence[int], bytes: Sequence[int], split: bool, most: int = 0, first_unit: Sequence[int] = []) -> None: ...

class Governor:
    def __init__(self, min_useful: float = 0.0, window: int = 128, rest: int = 512) -> None: ...

    def allows(self) -> bool: ...

    def pause(self, layers: int) -> None: ...

    def used(self, count: int = 1) -> None: ...

    def wasted(self, count: int = 1) -> None: ...

    @property
    def outcomes(self) -> tuple[int, int]:
        """Prefetches of the window that were used, and that were wasted."""

    @property
    def always(self) -> bool: ...

    @property
    def resting(self) -> bool: ...

    @property
    def state(self) -> tuple[int, int, int]: ...

class LayerCounts:
    @property
    def hits(self) -> int: ...

    @property
    def misses(self) -> int: ...

    @property
    def prefetched_hits(self) -> int: ...

    @property
    def top_hits(self) -> int: ...

    @property
    def low_bit_hits(self) -> int: ...

    @property
    def low_bit_misses(self) -> int: ...

    @property
    def late_prefetches(self) -> int: ...

    @property
    def forwards(self) -> int: ...

    @property
    def waves(self) -> int: ...

    @property
    def bytes_loaded_demand(self) -> int: ...

    @property
    def bytes_loaded_prefetch(self) -> int: ...

    @property
    def bytes_loaded_migration(self) -> int: ...

    @property
    def bytes_loaded_low_bit(self) -> int: ...

    @property
    def bytes_demanded_decode(self) -> int: ...

    @property
    def failed_prefetches(self) -> int: ...

    @property
    def bytes_wasted(self) -> int: ...

    @property
    def vacated(self) -> int: ...

    @property
    def bytes_premature(self) -> int: ...

    @property
    def bytes_written_back(self) -> int: ...

    @property
    def writebacks(self) -> int: ...

    @property
    def blocked_io_s(self) -> float: ...

    @property
    def writeback_link_s(self) -> float: ...

    @property
    def writeback_blocked_s(self) -> float: ...

    @property
    def total_io_s(self) -> float: ...

    @property
    def link_s(self) -> float: ...

    @property
    def io_path_s(self) -> float: ...

    @property
    def link_path_s(self) -> float: ...

class Totals:
    @property
    def decode_hits(self) -> int: ...

    @property
    def decode_misses(self) -> int: ...

    @property
    def decode_blocked_io_s(self) -> float: ...

    @property
    def bytes_preloaded(self) -> int: ...

    @property
    def substituted(self) -> int: ...

    @property
    def dropped(self) -> int: ...

class SourceCounts:
    @property
    def queued(self) -> int: ...

    @property
    def hits(self) -> int: ...

    @property
    def late(self) -> int: ...

    @property
    def wasted(self) -> int: ...

    @property
    def cancelled(self) -> int: ...

class Core:
    def __init__(self, layout: Layout, link: Link, order: Order, governor: Governor, writeback: bool = False) -> None: ...

    @property
    def decode_only(self) -> bool: ...

    @decode_only.setter
    def decode_only(self, arg: bool, /) -> None: ...

    @property
    def governor(self) -> Governor: ...

    @property
    def states(self) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,))]: ...

    @property
    def evictable(self) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,))]: ...

    @property
    def slots(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,))]: ...

    @property
    def pins(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,))]: ...

    @property
    def uses(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]: ...

    @property
    def emptied(self) -> int: ...

    @property
    def free_slots(self) -> int: ...

    @property
    def totals(self) -> Totals: ...

    @property
    def summed(self) -> LayerCounts: ...

    @property
    def resets(self) -> int: ...

    def rerouted(self, substituted: int, dropped: int) -> None: ...

    @property
    def under_way(self) -> list[int]: ...

    def state(self, segment: int) -> int: ...

    def there(self, first: int, stop: int) -> bool:
        """Whether all of these are loading or resident."""

    def free_of(self, slot_class: int) -> int: ...

    def counts(self, layer: int) -> LayerCounts: ...

    def source(self, number: int) -> SourceCounts: ...

    def reset_counts(self) -> None: ...

    def divide(self, layout: Layout, fill: Sequence[int]) -> None: ...

    def fill(self, keys: Sequence[int]) -> int: ...

    def migrate(self, keys: Sequence[int], keep_others: bool) -> None: ...

    def preload(self, keys: Sequence[int]) -> None: ...

    def flush(self) -> None: ...

    def wait_all(self) -> None: ...

    def settle(self) -> None: ...

    def resize(self, slots: int) -> list: ...

    def arrive(self, layer: int = -1) -> None: ...

    def drop_stale(self, layer: int, needed: Sequence[int]) -> None: ...

    def open(self, layer: int, keys: Sequence[int], counts: Sequence[int], tokens: int, low: Sequence[int]) -> list[int]: ...

    def plan(self, here: Sequence[int], keep: Sequence[int]) -> tuple: ...

    @property
    def planned(self) -> tuple[list[int], int]:
        """
        Of the present pass: segments that run here in their order, and how many of these were resident.
        """

    def begin(self) -> None: ...

    def load(self) -> None: ...

    def next(self) -> tuple[int, int]: ...

    def close(self, peer_blocked_s: float = 0.0, peer_link_s: float = 0.0) -> None: ...

    def abandon(self) -> None: ...

    def prefetch(self, keys: Sequence[int], keep: Sequence[int], source: int) -> int: ...

    def stream(self, source: int) -> bool: ...

    def may_sweep(self, pairs: int) -> bool: ...

    def owns(self, keys: Sequence[int]) -> None:
        """Of the experts that are this device's. Not called: all are."""

    def finish_prefetch(self, keys: Sequence[int], layer: int) -> None: ...

    def vacate(self, slots: int, layer: int) -> None: ...

    def leave(self, victims: Sequence[int], layer: int) -> None: ...

    def settle_times(self) -> None: ...

    def watch(self, seen: Watched) -> None: ...

    def check(self) -> str: ...

    def log_to(self, log: AskedLog) -> None: ...

class Watched:
    def __init__(self) -> None: ...

    def take(self) -> list: ...

class AskedLog:
    def __init__(self) -> None: ...

    def take(self) -> list: ...

class Planner:
    """
    The planner of `auto` (kernels/cpu/planner.hpp), which actors/policies/auto.py documents. Arrays are contiguous; each
    method raises ValueError for numbers out of range and arrays of another size.
    """

    def __init__(self, layers: int, experts: int, top_k: int, slots: int, workers: int, costs: tuple[float, float, float, float, float, float, float, float, float], states: numpy.typing.NDArray[numpy.uint8 | numpy.bool], without: int) -> None:
        """
        costs: copy, gpu, gpu_row, near, near_busy, free_rows, message, dense, beside. states [L, E] are read in place.
        """

    def plan(self, layer: int, needed: numpy.typing.NDArray[numpy.int32], rows: numpy.typing.NDArray[numpy.int32], now_s: float, link_free_s: float, flight_keys: numpy.typing.NDArray[numpy.int32], arrival_s: numpy.typing.NDArray[numpy.float64], action: numpy.typing.NDArray[numpy.uint8 | numpy.bool], worker: numpy.typing.NDArray[numpy.uint8 | numpy.bool], prompt_tokens: float, gpus: numpy.typing.NDArray[numpy.uint8 | numpy.bool] | None, held: numpy.typing.NDArray[numpy.uint8 | numpy.bool] | None, room: int) -> tuple[float, float, float, float, int, int, int, list[tuple[int, int, float]]]:
        """
        end_s, near_s, link_s, owner_s, loads, near, waits, and key, victim, worth_s of each background copy.
        """

    def used(self, layer: int, needed: numpy.typing.NDArray[numpy.int32]) -> None:
        """A layer has run."""

    def prompt_end(self, counts: numpy.typing.NDArray[numpy.int64], tokens: float, requests: int, batch: int) -> None:
        """Prompts have run: V is what they say of each expert."""

    def popularity(self, counts: numpy.typing.NDArray[numpy.int64], tokens: float, top_k: int, batch: int) -> None:
        """Popularity from elsewhere."""

    def resize(self, slots: int) -> None:
        """Another number of slots."""

    def admit(self, key: int) -> tuple[bool, int]:
        """Whether an expert takes a slot, and whose; -1: of none."""

    def worth(self, key: int) -> float:
        """Seconds that keeping an expert is worth: S of its layer times V."""

    def values(self) -> int:
        """The address of V, float64 [L, E], which lives as long as the planner."""

    def saw(self, part: int, expected_s: float, seen_s: float) -> None:
        """Correct a part of the costs."""

    def took(self, seen_s: float) -> None:
        """A layer's seen time."""

    def filled(self) -> None:
        """A background copy of a miss has ended."""

    def costs(self) -> tuple[float, float, float, float, float, float, float, float, float]:
        """Costs as corrected."""

    def followed(self) -> tuple[int, float, float, float, float]:
        """
        The rule that is followed (0: its own), seconds of a token as seen, and of on-demand, fill and split.
        """

    def error(self) -> float:
        """Mean error of predicted layer times, as a share of the time."""

def rank_by_votes(scores: Annotated[NDArray, dict(device='cpu', writable=False)], top: int, base: int) -> list[int]:
    """
    Experts that a later router would pick, most wanted first, with `base` added to each: each row of scores [T, E],
    float32 or float64, votes for its `top` highest; by votes, then highest score, then number.
    """

def rank_by_score(scores: Annotated[NDArray, dict(device='cpu', writable=False)], top: int, base: int) -> tuple[list[int], list[float]]:
    """
    The experts of the rows' `top` highest positive scores [T, E], float32 or float64, highest first, then by number,
    with `base` added to each; and their highest scores.
    """

class Placement:
    """Who runs a layer's experts."""

class Spared(Placement):
    """Everything runs on this device; `keys` are residents that leave last."""

    def __init__(self) -> None: ...

    @property
    def keys(self) -> list[int]: ...

    @keys.setter
    def keys(self, arg: Sequence[int], /) -> None: ...

class PlannedPlacement(Placement):
    """As a planner of misses says."""

    def __init__(self, core: Core, order: WholeOrder | None, pool: object | None, gpus: object | None, stats: object, states: object, miss: int, stream: int) -> None: ...

    def plan_by(self, planner: object, worths: object) -> None:
        """
        A `Planner`, or an object with the methods of `policies.auto.Auto`. worths [L, E] are read in place.
        """

    def begin(self, rows: Sequence[tuple[int, int, object]], prompt: bool, local: bool) -> None:
        """
        A forward begins. rows: start, stop and uses of each sequence; uses [L, E]: of a prompt, added to in place.
        """

    @property
    def local(self) -> bool: ...

    @local.setter
    def local(self, arg: bool, /) -> None: ...

    @property
    def missed(self) -> float | None: ...

class Passes:
    """
    The passes that have run until they are taken, where somebody asks for them.
    """

    @property
    def records(self) -> bool: ...

    @records.setter
    def records(self, arg: bool, /) -> None: ...

    def take(self) -> list: ...

class CpuLayers(Passes):
    def __init__(self) -> None: ...

class ByScores:
    def __init__(self, by_votes: bool, top: int, wraps: bool, streams: bool, source: int) -> None: ...

class Announced:
    """
    What the prefetch of a forward goes by.

    rows: of the present forward; 0: nobody has announced it. last_rows: the scores of each sequence's last row can be read.
    rests: nothing is prefetched. always: a policy is asked also where nothing that it may name is absent. waits: for copies
    under way, too.
    """

    def __init__(self) -> None: ...

    @property
    def rows(self) -> int: ...

    @rows.setter
    def rows(self, arg: int, /) -> None: ...

    @property
    def last_rows(self) -> bool: ...

    @last_rows.setter
    def last_rows(self, arg: bool, /) -> None: ...

    @property
    def rests(self) -> bool: ...

    @rests.setter
    def rests(self, arg: bool, /) -> None: ...

    @property
    def always(self) -> bool: ...

    @always.setter
    def always(self, arg: bool, /) -> None: ...

    @property
    def waits(self) -> bool: ...

    @waits.setter
    def waits(self, arg: bool, /) -> None: ...

    def idle(self, core: Core, reach: Sequence[tuple[int, int]], allowed: bool) -> bool:
        """Whether a prefetch for these keys (first, end) need not be asked."""

class Planned:
    """Whether the placement decides the present forward: `Parts::planned`."""

    def __init__(self) -> None: ...

    @property
    def now(self) -> bool: ...

    @now.setter
    def now(self, arg: bool, /) -> None: ...

class Layer:
    """
    A layer's pass in one call; routers are named by their numbers there, -1: none.
    """

    def rule(self, of: Rule, router: int) -> None:
        """router: the layer's own, if the rule reads its probabilities."""

    def ask_routers(self, router: int, first: int, layers: int, by: ByScores, of: Announced) -> None: ...

    def stream_next(self, source: int) -> None:
        """A pass that sweeps queues the next layer's experts of this device."""

    def release_slots(self, own: int, router: int, of: PreEviction) -> None: ...

    def parts(self, begin: object, planned: Planned, rule: bool, ahead: bool, watched: bool, alone: bool) -> None:
        """
        Parts in Python, behind the native ones: methods of what `begin` makes (`engine.layer.Pass`).

        rule, ahead: there are such. watched: it says who runs where in each pass; else in planned ones. alone: planned passes have
        no native rule or prefetch.
        """

    def placement(self, of: Placement) -> None:
        """It decides in place of Python's part."""

    @property
    def partial(self) -> bool:
        """
        Whether ids may be -1: pairs that run elsewhere, and count as zeros here.
        """

    @partial.setter
    def partial(self, arg: bool, /) -> None: ...

    def time(self, by_cpu: bool | None) -> None:
        """
        Whether the parts of a pass are timed, by the thread's CPU time or by wall-clock; None: they are not.
        """

    @property
    def kernels_s(self) -> float: ...

    @property
    def placed_s(self) -> float:
        """Of a native placement."""

class CpuLayer(Layer):
    def __init__(self, core: Core, kernels: CapsuleType, index: int, experts: int, run: CapsuleType, all: CpuLayers) -> None:
        """run: the experts, as `_cpu.slot_experts`."""

    def router(self, weight: int, bias: int, outputs: int, soft: int) -> int:
        """The number of a linear router of these addresses."""

    def run(self, hidden: int, ids: int, weights: int, tokens: int, top_k: int, out: int) -> None: ...

    @property
    def step(self) -> CapsuleType: ...

    def fail(self) -> None: ...

class PythonLayer(Layer):
    """A layer whose routing and kernels are Python's."""

    def __init__(self, core: Core, index: int, experts: int, neurons: int, all: CpuLayers, begin: object) -> None:
        """
        begin: makes the `engine.layer.Pass` of the present pass; it refers weakly to what holds this layer.
        """

    def run(self) -> object:
        """One pass; what `Pass.combine` gives."""

class GpuLayer(Layer):
    """
    low: launches low-bit replicas, or None. reads: `_launch.Fetch.reads`, or None. scored_rows: of inputs whose routers' scores it finds.

    fetch: (tensors, hidden, numbers of routers) -> contiguous arrays, where `reads` cannot.
    """

    def __init__(self, core: Core, launches: CapsuleType, low: CapsuleType | None, reads: CapsuleType | None, scored_rows: int, fetch: object, index: int, experts: int, neurons: int, max_rows: int, all: CpuLayers) -> None: ...

    def router(self, operands: object | None, outputs: int) -> int:
        """The number of a router (weight, bias, layers, softmax), or of another."""

    def run(self, hidden: object, ids: object, weights: object, into: object | None = None) -> object: ...

    @property
    def read_s(self) -> tuple[float, float]:
        """Of reading, and of the waits in it."""

class MapStore:
    def __init__(self, embeddings: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], maps: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu')], squares: Annotated[NDArray[numpy.float64], dict(shape=(None, None), order='C', device='cpu')], share: float) -> None:
        """The arrays are read and written in place."""

    @property
    def count(self) -> int: ...

    @property
    def generation(self) -> int: ...

    def add(self, embedding: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], map: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)]) -> int: ...

    def fill(self, entries: int) -> None:
        """The arrays hold these entries, but for their squares."""

class MapSearch:
    def __init__(self, store: MapStore, embeddings: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)]) -> None: ...

    @property
    def sequences(self) -> int: ...

    @property
    def complete(self) -> bool:
        """Whether every layer was seen."""

    def match(self, semantic: bool) -> tuple[list[int], Annotated[NDArray[numpy.float64], dict(shape=(None,))]] | None:
        """
        The most similar entry of each sequence, and its score; semantic: by embedding, without unknown ones.
        """

    def scores(self) -> Annotated[NDArray[numpy.float64], dict(shape=(None, None))]:
        """Cosine of the layers seen with those of each entry [S, n]."""

    def observe(self, layer: int, probabilities: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)]) -> None:
        """Of this layer and those behind it [S, n * J]."""

    def forecast(self, semantic: bool, first: int, stop: int, now: int, top_k: int, dynamic: bool) -> tuple[Annotated[NDArray[numpy.int32], dict(shape=(None,))], Annotated[NDArray[numpy.float32], dict(shape=(None,))], int, Annotated[NDArray[numpy.float64], dict(shape=(None,))]] | None:
        """
        (keys, priorities, how many are wanted, score of each match) of the layers from `first` to before `stop`.
        """

    def commit(self) -> list[int]: ...

def expect_map(probabilities: numpy.typing.NDArray[numpy.float64], keys: numpy.typing.NDArray[numpy.int32], priorities: numpy.typing.NDArray[numpy.float32], now: int, experts: int, told: numpy.typing.NDArray[numpy.int64]) -> None:
    """
    Sets the probabilities of those keys that there are; what is told of their layers [L] changes.

    Raises ValueError: lengths differ.
    """

class Routing:
    """
    A layer's routing as it runs, with its pairs t * top_k + k grouped by expert.
    """

    def __init__(self, layer: int, experts: int, ids: Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', device='cpu', writable=False)], partial: bool = False) -> None:
        """
        experts: of the layer. ids: int64 [T, K]. partial: pairs may have no expert (-1), and do not run.

        Raises ValueError: there is no such expert.
        """

    @property
    def layer(self) -> int: ...

    @property
    def tokens(self) -> int: ...

    @property
    def top_k(self) -> int: ...

    @property
    def pairs(self) -> int:
        """How many run."""

    @property
    def experts(self) -> list[int]:
        """Distinct: as picked for one token of distinct experts, else rising."""

    @property
    def counts(self) -> list[int]:
        """Rows of each."""

    @property
    def in_order(self) -> bool:
        """Whether `order` is 0, 1, ..: of one token of distinct experts."""

    @property
    def order(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
        """The pairs, grouped by expert [T * K]; those that do not run come last."""

    def pairs_of(self, keys: Sequence[int]) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
        """The pairs of these needed experts."""

    def part(self, keys: Sequence[int], weights: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)]) -> tuple[Annotated[NDArray[numpy.int32], dict(shape=(None,))], Annotated[NDArray[numpy.int32], dict(shape=(None,))], Annotated[NDArray[numpy.int32], dict(shape=(None,))], Annotated[NDArray[numpy.float32], dict(shape=(None,))], Annotated[NDArray[numpy.int64], dict(shape=(None,))]]:
        """
        Of some needed experts, in this order, as `ExpertBatch` has them: experts, starts, rows, weights; and the tokens
        of these rows, rising. weights: of all pairs [T, K].
        """

class Driver:
    """
    The calls of a GPU's driver that a link makes, by address (actors/core/driver.hpp).
    """

    def __init__(self, context: int, addresses: dict) -> None: ...

    @property
    def context(self) -> int: ...

    def wait_for(self, event: int, spin_s: float) -> None:
        """
        Make the host wait: poll, and only after `spin_s` give up the interpreter's lock.
        """

    @property
    def addresses(self) -> dict:
        """Of the calls, by the names that `__init__` takes."""

class StreamLink(Link):
    def __init__(self, driver: Driver, demand: int, prefetch: int, ahead_bytes: int, compute: Callable, cast: Callable, pinned: Callable, other: Link | None) -> None: ...

    def place(self, homes: Sequence[Sequence[tuple[int, int]]], home_of: Sequence[int], position: Sequence[int], sources: Sequence[tuple[int, int, bool, int, int]], tensors: int) -> None: ...

    def ahead(self, bytes: int, part: int) -> None: ...

    def submit(self, ticket: int, segment: int, slot: int, bytes: int) -> bool:
        """Queue a copy of nobody's, as a test wants it."""

    @property
    def waiting(self) -> list[int]:
        """Segments of which not all is enqueued."""

    def enqueued(self, urgent: bool) -> list:
        """Parts that are not known to have ended: (segment, bytes)."""

class Instant:
    """
    A driver whose calls take no time, in a GPU's place (actors/core/instant_driver.hpp).
    """

    def __init__(self) -> None: ...

    def driver(self) -> Driver: ...

    @property
    def compute(self) -> int: ...

    @property
    def works(self) -> bool: ...

    @works.setter
    def works(self, arg: bool, /) -> None: ...

    @property
    def late(self) -> bool: ...

    @late.setter
    def late(self, arg: bool, /) -> None: ...

    def settle(self) -> None: ...

    def event(self) -> InstantEvent: ...

class InstantEvent:
    def record(self, compute: bool) -> None: ...

    def done(self) -> bool: ...

    def synchronize(self) -> None: ...

class VirtualLayer(Layer):
    def router(self, layers: int) -> int:
        """The number of the recorded scores of so many later layers."""

class VirtualRun:
    """The layers of a device on a virtual clock (virtual_run.hpp)."""

    def __init__(self, core: Core, link: VirtualLink, clock: Clock, expert_s: float, expert_row_s: float, share: float, load_byte_s: float, miss_s: float, neurons: int) -> None: ...

    def forward(self, ids: Annotated[NDArray[numpy.int64], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], dense_s: float, *, weights: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu', writable=False)] | None = None, next_ids: Annotated[NDArray[numpy.int64], dict(shape=(None, None, None, None), order='C', device='cpu', writable=False)] | None = None, next_scores: Annotated[NDArray[numpy.float64], dict(shape=(None, None, None, None), order='C', device='cpu', writable=False)] | None = None, last_rows: Sequence[int] = []) -> None:
        """
        All layers of a forward. ids, weights: as picked [L, T, K]. dense_s: of each layer. next_ids, next_scores: by which a
        prefetch goes [T, L, D, P].
        """

    def run(self, layer: int, tokens: int, experts: Sequence[int], counts: Sequence[int]) -> None:
        """A layer's rows that came in a message: experts, and the rows of each."""

    @property
    def layers(self) -> list: ...

    @property
    def passes(self) -> Passes: ...
