"""The accidents: for each, what one rank of a training program does otherwise, and the truth.

An accident is text that takes a slot of `PROGRAM`. In it, `bad` is True on the rank at fault, `now`
is True on that rank in one step, and lines that end in `# here` are those that a verdict may name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

PROGRAM = '''\
"""{name}: rank {bad} of {world}, {wrapper}, {op}"""
import contextlib, ctypes, fcntl, gc, os, signal, subprocess, sys, threading, time
from datetime import timedelta
import torch
import torch.distributed as dist
import gradwire
from gradwire import collectives

LOCAL_RANK = int(os.environ["LOCAL_RANK"])
BAD, AT, STEPS, LONG, WORLD = {bad}, {at}, {steps}, 60, {world}
LOCK, PORT = "lock", {port}
bad = LOCAL_RANK == BAD
{top}

class Net(torch.nn.Module):
    def __init__(self, hidden=8):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, hidden), torch.nn.Linear(hidden, 8)
    def forward(self, x, short=False):
        x = self.first(x).relu()
        return x if short else self.second(x)

class Words(torch.nn.Module):
    def __init__(self, sparse):
        super().__init__()
        self.words, self.last = torch.nn.Embedding(9, 4, sparse=sparse), torch.nn.Linear(4, 2)
    def forward(self, x):
        return self.last(self.words(x.long()))

def average(model):
    if not {ddp}:
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)

def main():
    timeout = timedelta(seconds={seconds})
    {init}
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    {model}
    model = {wrap}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    {setup}
    for step in {loop}:
        now = bad and step == AT
        {before}
        {forward}
        {backward}
        optimizer.step()
        optimizer.zero_grad()
        {metric}
        {after}
    {end}

{call}
'''

SLOTS = {
    "top": "",
    "init": 'dist.init_process_group("{backend}", timeout=timeout)',
    "model": "model = Net()",
    "setup": "",
    "loop": "range(STEPS)",
    "before": "",
    "forward": "loss = model(torch.ones(3, 4)).square().mean()",
    "backward": "loss.backward()\naverage(model)",
    "after": "",
    "end": "dist.barrier()\ndist.destroy_process_group()",
    "call": "main()",
}
DDP = ("gradwire", "torch")


@dataclass(frozen=True)
class Accident:
    """One kind of accident, and the truth about it.

    Attributes:
        name: Name of the kind.
        family: Name of the family.
        kinds: Kinds of findings that are right; any if empty.
        words: Pattern, of which the finding's text has a match if it tells the cause.
        slots: Text by slot of the program.
        guilty: Ranks that the verdict may name: "bad", the rank at fault; "bad, next", or the one
            after it, too; "all", where all run the same code; "absent", the one that was never
            started; or "none".
        nobody: True if a verdict that names no rank, or all, is right, too.
        sides: True if only a majority shows who is at fault: of two ranks, any or none is right.
        harmless: True if the program may end as if nothing had happened.
        wrappers: Wrappers of the model with which it can happen.
        backends: Backends with which it can happen.
        bad: The rank at fault; None for any.
        steps: Number of steps.
    """

    name: str
    family: str
    kinds: frozenset[str]
    words: str
    slots: dict[str, str] = field(repr=False)
    guilty: str = "bad"
    nobody: bool = False
    sides: bool = False
    harmless: bool = False
    wrappers: Sequence[str] = ("gradwire", "torch", "none")
    backends: Sequence[str] = ("gloo", "shm")
    bad: int | None = None
    steps: int = 5

    def lines(self, program: str) -> list[int]:
        """Return the lines of a program that a verdict may name; empty if that is not judged."""
        numbered = enumerate(program.splitlines(), 1)
        return [number for number, line in numbered if line.endswith("# here")]

    def ranks(self, bad: int, world: int) -> set[int]:
        if self.guilty == "all" or (self.sides and world == 2):
            return set(range(world))
        ranks = {"absent": {world}, "bad, next": {bad, (bad + 1) % world}, "none": set()}
        return ranks.get(self.guilty, {bad})


ACCIDENTS: dict[str, Accident] = {}
QUICK = ("early_stop", "dtype", "input", "sigkill", "wrong_port", "pause")
"""One accident of each family."""


def _add(name: str, family: str, kinds: str, words: str = "", **more: object) -> None:
    slots = {slot: str(more.pop(slot)).strip() for slot in SLOTS if slot in more}
    known = frozenset(kinds.split(", ")) if kinds else frozenset()
    ACCIDENTS[name] = Accident(name, family, known, words, SLOTS | slots, **more)  # type: ignore[arg-type]


# fmt: off
# -- other numbers of calls ----------------------------------------------------------------------
UNEVEN = "finished early, mismatch, skipped, missing"
MORE = r"ended|finished|early|more|fewer|times|uneven"
_add("one_batch_more", "uneven", UNEVEN, MORE, loop="range(STEPS + bad)", end="", sides=True)
_add("early_stop", "uneven", UNEVEN, MORE, before="if now:\n    break", end="", sides=True)
_add("accumulation_counts", "uneven", UNEVEN, sides=True, steps=8, wrappers=("gradwire", "torch"),
     forward="""
last = (step + 1) % (2 if bad else 4) == 0
with contextlib.nullcontext() if last else model.no_sync():
    loss = model(torch.ones(3, 4)).square().mean()
    loss.backward()""", backward="")
_add("accumulation_counts_by_hand", "uneven", UNEVEN, sides=True, steps=8, wrappers=("none",),
     backward="loss.backward()\nif (step + 1) % (2 if bad else 4) == 0:\n    average(model)")

# -- other calls ---------------------------------------------------------------------------------
OTHER = "mismatch, skipped, missing, finished early, error, deadlock"
_add("evaluation_on_one_rank", "calls", OTHER, sides=True, after="""
if now:
    with torch.no_grad():
        dist.all_reduce(model(torch.ones(3, 4)).mean())""")
_add("barrier_in_a_branch", "calls", OTHER, sides=True, after="if now:\n    dist.barrier()")
_add("no_barrier_in_a_branch", "calls", OTHER, sides=True, after="if not now:\n    dist.barrier()")
_add("order_of_groups", "calls", "deadlock, mismatch", sides=True, nobody=True,
     words="order|wait for each other",
     setup="groups = [dist.new_group(timeout=timeout) for _ in range(2)]",
     after="""
for group in reversed(groups) if now else groups:
    dist.all_reduce(torch.ones(6), group=group)  # here""")
_add("order_of_a_set", "calls", OTHER, sides=True,
     top="""
class Name(str):
    def __hash__(self):  # as the hash of a str: other in each process
        return (str(self) == "loss") ^ bad
""",
     after="""
for name in {Name("loss"), Name("accuracy")}:
    dist.all_reduce(torch.ones(len(name)))  # here""")
_add("ring_of_receives", "calls", "deadlock", "wait for|recv|receive", guilty="all", nobody=True,
     after="""
if step == AT:
    dist.recv(torch.ones(4), (rank - 1) % size)  # here
    dist.send(torch.ones(4), (rank + 1) % size)""")
_add("dtype", "calls", "mismatch, error", r"[Dd]ouble|float64|dtype|size", sides=True,
     after="dist.all_reduce(torch.ones(8, dtype=torch.double if now else None))  # here")
_add("size", "calls", "mismatch", "size", sides=True,
     after="dist.all_reduce(torch.ones(8 if now else 2000))  # here")
_add("other_model", "calls", "mismatch, error", sides=True, model="model = Net(12 if bad else 8)")
_add("sparse_on_one_rank", "calls", "mismatch, error, missing, skipped", sides=True,
     model="model = Words(sparse=bad)")
_add("reduce_op", "calls", "mismatch, error", harmless=True, sides=True,  # Gloo does not notice
     after="""
op = dist.ReduceOp.MAX if now else dist.ReduceOp.SUM
dist.all_reduce(torch.ones(8), op)  # here""")
_add("order_of_calls", "calls", OTHER, sides=True, setup="""
one = lambda: dist.all_reduce(torch.ones(6))
two = lambda: dist.broadcast(torch.ones(4), 0)""",
     after="for part in (two, one) if now else (one, two):\n    part()")
_add("backward_skipped", "calls", OTHER, sides=True, wrappers=DDP,
     backward="if not now:\n    loss.backward()")
_add("message_not_sent", "calls", "", nobody=True, after="""
for src in range(size):
    if rank == src and not now:
        dist.send(torch.ones(4), (rank + 1) % size)
    if rank == (src + 1) % size:
        dist.recv(torch.ones(4), src)""")
_add("messages_in_a_batch", "calls", "", nobody=True, after="""
if not now:
    for work in dist.batch_isend_irecv([
        dist.P2POp(dist.isend, torch.ones(4), (rank + 1) % size),
        dist.P2POp(dist.irecv, torch.ones(4), (rank - 1) % size)]):
        work.wait()""")
_add("monitored_barrier", "calls", "", nobody=True, sides=True, backends=("gloo",),
     after="if not now:\n    dist.monitored_barrier(timeout=timeout)")
_add("group_not_made", "calls", "", nobody=True, sides=True,
     after="if step == AT and not bad:\n    dist.new_group(list(range(size)))")
_add("handle_never_awaited", "calls", "", harmless=True,
     end="""
work = dist.all_reduce(torch.ones(1 << 20), async_op=True)
if not bad:
    work.wait()""")

# -- a rank that is in other code ----------------------------------------------------------------
AWAY = "missing, deadlock"
_add("slow_checkpoint", "away", AWAY, after="""
if now:
    torch.save(model.state_dict(), os.devnull)
    time.sleep(LONG)  # here""")
_add("stuck_loader_worker", "away", AWAY,
     top="""
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 100
    def __getitem__(self, index):
        if bad and index == AT:
            time.sleep(LONG)  # here
        return torch.ones(3, 4)
""",
     setup="data = iter(torch.utils.data.DataLoader(Data(), batch_size=None, num_workers=1))",
     before="batch = next(data)  # here")
_add("file_lock", "away", AWAY, "lock", guilty="bad, next", before="""
if step == AT and rank == (BAD + 1) % size:
    forgotten = open(LOCK, "w")
    fcntl.flock(forgotten, fcntl.LOCK_EX)
    open(LOCK + "-held", "w").close()
if now:
    while not os.path.exists(LOCK + "-held"):
        time.sleep(0.01)
    with open(LOCK, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # here""")
_add("input", "away", AWAY,
     before='if now:\n    input("Continue? ")  # here')
_add("gil_held_in_c", "away", AWAY,  # no bytecode runs between calls, as in any long call of C
     before="if now:\n    list(map(ctypes.PyDLL(None).sleep, [1] * LONG))  # here")
_add("thread_deadlock", "away", AWAY, before="""
if now:
    first, second = threading.Lock(), threading.Lock()
    def other():
        with second, first:
            pass
    first.acquire()
    threading.Thread(target=other, daemon=True).start()
    while not second.locked():
        time.sleep(0.01)
    second.acquire()  # here""")
_add("endless_loop", "away", AWAY,
     before="while now:\n    time.sleep(0.01)  # here")
_add("stopped", "away", "stopped, missing", "stopped",
     before="if now:\n    os.kill(os.getpid(), signal.SIGSTOP)")
_add("full_pipe", "away", AWAY, before="""
if now:
    child = subprocess.Popen("yes | head -c 1000000", shell=True, stdout=subprocess.PIPE)
    child.wait()  # here""")

# -- errors and ends -----------------------------------------------------------------------------
ENDED = "finished early, died, missing, error"
_add("exit_0", "ends", ENDED, "exit|ended", before="if now:\n    sys.exit(0)")
_add("exit_0_at_once", "ends", ENDED, "exit|ended|died", before="if now:\n    os._exit(0)")
_add("exit_with_text", "ends", ENDED, "exit|no data left",
     before='if now:\n    sys.exit("no data left")  # here')
_add("segfault_in_a_thread", "ends", "crashed, died", "SIGSEGV|[Ss]egmentation",
     top="def crash():\n    ctypes.string_at(0)  # here",
     before="if now:\n    threading.Thread(target=crash).start()\n    time.sleep(0.5)")
_add("sigterm", "ends", "died", "SIGTERM|terminated",
     before='if now:\n    subprocess.run(["kill", "-TERM", str(os.getpid())])')
_add("sigkill", "ends", "died", "SIGKILL|killed",
     before="if now:\n    os.kill(os.getpid(), signal.SIGKILL)")
_add("abort", "ends", "crashed, died", "Abort", before="if now:\n    os.abort()  # here")
RAISES = 'if now:\n    raise KeyError("bad")'
_add("error", "ends", "error", "KeyError", before=RAISES + "  # here")
_add("error_wrapped_by_all", "ends", "error", before=RAISES, call="""
try:
    main()
except Exception as error:
    raise ValueError("step failed") from error""")
_add("errors_in_the_others_cleanup", "ends", "error", before=RAISES, call="""
try:
    main()
finally:
    if not bad and sys.exc_info()[0]:
        [].pop()""")
_add("errors_after_swallowed_ones", "ends", ENDED, before="if now:\n    os._exit(1)", call="""
try:
    main()
except RuntimeError:
    pass
if not bad:
    raise ValueError("no result")""")
_add("error_in_c", "ends", "error", "shapes|mat1",
     forward="loss = model(torch.ones(3, 5 if now else 4)).square().mean()")
_add("error_in_a_hook", "ends", "error", "own error", wrappers=("gradwire",), setup="""
def hook(state, bucket):
    if failing:
        raise ValueError("the hook's own error")
    return gradwire.hooks.all_reduce(None, bucket)
failing = []
model.register_comm_hook(None, hook)""", before="failing[:] = [1] if now else []")
_add("error_in_a_second_job", "ends", "error", "KeyError", before=RAISES, init="""
dist.init_process_group("{backend}", timeout=timeout)
for _ in range(3):
    dist.all_reduce(torch.ones(2))
dist.barrier()
dist.destroy_process_group()
dist.init_process_group("{backend}", timeout=timeout, rank=LOCAL_RANK, world_size=WORLD,
    store=dist.FileStore("store", WORLD))""")
_add("import_error", "ends", "error", "No module|ModuleNotFound",
     top="if bad:\n    import a_package_that_is_not_installed  # here")
_add("out_of_memory", "ends", "error", "memory|allocate",
     before="if now:\n    torch.empty(1 << 50)  # here")
_add("unpicklable_object", "ends", "error", "pickle",
     after="if step == AT:\n    dist.all_gather_object([None] * size, main.__code__ if bad else 0)"
     "  # here")
_add("swallowed_hook_error", "ends", "skipped, error, mismatch, missing, finished early",
     setup="""
failing = []
def check(gradient):
    if failing:
        raise ValueError("a bad gradient")
next(model.parameters()).register_hook(check)""",
     backward="""
failing[:] = [1] if now else []
try:
    loss.backward()
    average(model)
except ValueError:
    print("skipped a batch")""")
_add("unused_layer", "ends", "error, skipped, missing, mismatch", "second|unused|gradient|backward",
     wrappers=DDP, forward="loss = model(torch.ones(3, 4), short=now).square().mean()")
_add("nan", "ends", "", "nan|finite", nobody=True,
     forward='loss = model(torch.full((3, 4), float("inf") if now else 1.0)).square().mean()',
     after="""
if not all(parameter.isfinite().all() for parameter in model.parameters()):
    raise FloatingPointError("the parameters are not finite")""")

# -- start-up ------------------------------------------------------------------------------------
_add("same_rank_twice", "start", "", "twice|same rank|RANK|never started|two processes",
     guilty="bad, next", top='if bad:\n    os.environ["RANK"] = str((BAD + 1) % WORLD)')
_add("world_size_too_large", "start", "", "WORLD_SIZE|world size|never started|no process",
     guilty="absent", top='os.environ["WORLD_SIZE"] = str(WORLD + 1)')
_add("wrong_port", "start", "", "port|PORT|store|connect", sides=True,
     top='if bad:\n    os.environ["MASTER_PORT"] = str(PORT)')
_add("store_gone", "start", "", "store|ended|exit", bad=0,
     init='os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)\n'
     'dist.init_process_group("{backend}", timeout=timeout, rank=LOCAL_RANK, world_size=WORLD,\n'
     '    init_method=f"tcp://127.0.0.1:{PORT}")',
     end="if bad:\n    os._exit(0)\ntime.sleep(1)\ndist.new_group(list(range(1, size)))")

# -- slowness ------------------------------------------------------------------------------------
_add("pause", "slow", "slow rank", before="if now:\n    time.sleep(4)")
_add("garbage_collection", "slow", "slow rank", "garbage|gc", steps=8,
     setup="heap = [{step: [step]} for step in range(400_000)] if bad else []",
     before="if bad:\n    gc.collect()")
_add("slow_rank", "slow", "slow rank", steps=8, before="time.sleep(0.4 if bad else 0.01)")
_add("slow_link", "slow", "slow transfer", steps=8, nobody=True, backends=("shm",),
     top="""
if bad:
    from gradwire.shm.semaphores import Semaphores
    post = Semaphores.post
    def late(self, peers):
        time.sleep(0.03)
        post(self, peers)
    Semaphores.post = late
""",
     after="dist.barrier()\ndist.all_reduce(torch.ones(1 << 19))")
_add("no_accident", "slow", "nothing", guilty="none", nobody=True, harmless=True)

# -- the same families, other causes -------------------------------------------------------------
_add("roots_of_a_broadcast", "calls", "mismatch, deadlock, missing", sides=True, nobody=True,
     after="dist.broadcast(torch.ones(4), BAD if now else (BAD + 1) % size)  # here")
_add("root_of_a_gather", "calls", "mismatch, deadlock, missing, error", sides=True, nobody=True,
     after="""
root = BAD if now else (BAD + 1) % size
dist.gather(torch.ones(2), [torch.ones(2)] * size if rank == root else None, root)  # here""")
_add("short_list_of_a_scatter", "calls", "error, mismatch", "scatter|list|size", bad=0,
     after="dist.scatter(torch.ones(2), None if rank else [torch.ones(2)] * (size - 1))  # here")
_add("splits_of_an_all_to_all", "calls", "mismatch, error", "split|size|sum", sides=True, after="""
parts = [1] * size
parts[-1] += now
dist.all_to_all_single(torch.ones(size), torch.ones(size + now), [1] * size, parts)  # here""")
_add("barrier_of_another_line", "calls", OTHER, sides=True, before="""
if now:
    break
dist.barrier()""", forward="loss = torch.ones(())", backward="pass")
_add("more_microbatches", "calls", OTHER, sides=True,
     after="for _ in range(3 if now else 2):\n    dist.all_reduce(torch.ones(2))\ndist.barrier()")
_add("groups_made_in_another_order", "calls", "", nobody=True, sides=True, harmless=True,
     init="""
dist.init_process_group("{backend}", timeout=timeout)
for ranks in [[0, 1], [0]] if bad else [[0], [0, 1]]:
    dist.new_group(ranks, timeout=timeout)""")
_add("members_of_a_group", "calls", "", nobody=True, sides=True,
     setup="group = dist.new_group([BAD] if bad else list(range(size)), timeout=timeout)",
     after="if dist.get_rank(group) >= 0:\n    dist.all_reduce(torch.ones(2), group=group)")
_add("threads_in_another_order", "calls", "", guilty="all", nobody=True, setup="""
groups = [dist.new_group(timeout=timeout) for _ in range(2)]
locks = [threading.Lock(), threading.Lock()]
def reduce(first):
    with locks[first]:
        dist.all_reduce(torch.ones(3), group=groups[first])
        with locks[1 - first]:
            dist.all_reduce(torch.ones(3), group=groups[1 - first])""", after="""
if step == AT:
    threads = [threading.Thread(target=reduce, args=[n], daemon=True) for n in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]""")
_add("message_that_nobody_receives", "calls", "", nobody=True, harmless=True,
     after="if now:\n    dist.send(torch.ones(1 << 22), (rank + 1) % size)  # here")
_add("message_from_another_rank", "calls", "", nobody=True, guilty="bad, next", after="""
if step == AT and rank == (BAD + 1) % size:
    dist.send(torch.ones(4), (rank + 1) % size)
if now:
    dist.recv(torch.ones(4), (rank + 1) % size)""")
_add("tag_of_a_message", "calls", "", nobody=True, guilty="bad, next", after="""
if now:
    dist.send(torch.ones(1 << 20), (rank + 1) % size, tag=1)
if step == AT and rank == (BAD + 1) % size:
    dist.recv(torch.ones(1 << 20), BAD, tag=2)""")
_add("frozen_on_one_rank", "calls", "mismatch, error, skipped, missing", sides=True, nobody=True,
     wrappers=DDP,
     model="model = Net()\nmodel.second.weight.requires_grad = not bad")
_add("no_sync_on_one_rank", "calls", OTHER, sides=True, wrappers=DDP, steps=6, backward="""
with model.no_sync() if now else contextlib.nullcontext():
    model(torch.ones(3, 4)).mean().backward()""", forward="loss = torch.ones(())")
_add("barrier_in_a_handler", "calls", "error, mismatch, skipped, missing", "KeyError|barrier",
     call="""
try:
    main()
except KeyError:
    dist.barrier()
    raise""", before='if now:\n    raise KeyError("bad")', sides=True)
_add("rows_by_data", "calls", "mismatch", "size", sides=True, setup="ids = torch.arange(12)",
     after="dist.all_reduce(torch.zeros(len(torch.unique(ids % (5 if now else 4)))))  # here")
_add("wait_before_or_after", "calls", OTHER, sides=True, after="""
work = None if now else dist.all_reduce(torch.ones(2), async_op=True)
dist.barrier()
work = work or dist.all_reduce(torch.ones(2), async_op=True)
work.wait()""")
_add("step_skipped", "calls", OTHER, sides=True, before="if now:\n    continue")
_add("database_lock", "away", AWAY, guilty="bad, next", before="""
import sqlite3
if step == AT and rank == (BAD + 1) % size:
    base = sqlite3.connect("base", isolation_level=None)
    base.execute("begin exclusive")
    open("held", "w").close()
if now:
    while not os.path.exists("held"):
        time.sleep(0.01)
    sqlite3.connect("base", timeout=LONG).execute("create table t (x)")  # here""")
_add("file_lock_around_a_collective", "away", "", "lock", nobody=True, after="""
if step == AT:
    while not (bad or os.path.exists(LOCK + "-held")):
        time.sleep(0.01)
    with open(LOCK, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # here
        open(LOCK + "-held", "w").close()
        dist.all_reduce(torch.ones(2))  # here""")
_add("lock_around_a_collective", "away", "", sides=True, nobody=True, setup="""
lock, entered = threading.Lock(), threading.Event()
group = dist.new_group(timeout=timeout)
def report():
    with lock:
        entered.set()
        dist.all_reduce(torch.ones(2), group=group)  # here""", after="""
if step == AT:
    thread = threading.Thread(target=report, daemon=True)
    if bad:
        thread.start()
        entered.wait()
    with lock:  # here
        dist.barrier()
    if not bad:
        thread.start()
    thread.join()""")
_add("fork_with_a_lock", "away", AWAY, before="""
if now:
    lock = threading.Lock()
    lock.acquire()
    child = os.fork()
    if not child:
        lock.acquire()  # here
    os.waitpid(child, 0)  # here""")
_add("dead_prefetch_thread", "away", AWAY + ", error", "ValueError|queue", before="""
import queue
if now:
    batches = queue.Queue()
    def load():
        raise ValueError("no such shard")  # here
    threading.Thread(target=load).start()
    batches.get()  # here""")
_add("left_the_group", "away", AWAY + ", finished early, error, died", before="""
if now:
    dist.destroy_process_group()
    time.sleep(LONG)  # here""")
_add("late_start", "away", AWAY + ", start-up", top="if bad:\n    time.sleep(LONG)  # here")
_add("files_exhausted", "ends", "error", "Too many open files", before="""
if now:
    files = []
    while True:
        files.append(open(os.devnull))  # here""")
_add("hidden_by_finally", "ends", "error", "KeyError", before="""
if now:
    try:
        raise KeyError("bad")
    finally:
        [].pop()""")
_add("hidden_by_a_context", "ends", "error", "KeyError", before="""
@contextlib.contextmanager
def saving():
    try:
        yield
    finally:
        os.remove("no such file")
with saving() if now else contextlib.nullcontext():
    if now:
        raise KeyError("bad")""")
_add("loader_worker_killed", "ends", "error, died", "worker", top="""
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 100
    def __getitem__(self, index):
        if bad and index == AT:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.ones(3, 4)
""", setup="data = iter(torch.utils.data.DataLoader(Data(), batch_size=None, num_workers=1))",
     before="batch = next(data)")
_add("loader_worker_error", "ends", "error", "KeyError", top="""
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 100
    def __getitem__(self, index):
        if bad and index == AT:
            raise KeyError("bad")
        return torch.ones(3, 4)
""", setup="data = iter(torch.utils.data.DataLoader(Data(), batch_size=None, num_workers=1))",
     before="batch = next(data)")
_add("error_in_backward", "ends", "error", "own backward", top="""
class Cube(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x ** 3
    @staticmethod
    def backward(context, gradient):
        if cube_fails:
            raise ValueError("own backward")
        return gradient
cube_fails = []
""", before="cube_fails[:] = [1] if now else []",
     forward="loss = Cube.apply(model(torch.ones(3, 4))).square().mean()")
_add("short_list_of_objects", "ends", "error", "IndexError|index",
     after="dist.all_gather_object([None] * (size - now), 1)  # here")
_add("object_that_cannot_be_loaded", "ends", "", nobody=True, guilty="all", top="""
class Report:
    def __reduce__(self):
        return (int, ("x",)) if bad else (int, ("1",))
""", after="if step == AT:\n    dist.all_gather_object([None] * size, Report())  # here")
_add("exit_in_a_handler", "ends", ENDED, "exit", before="""
if now:
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(3))
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(LONG)""")
_add("group_made_twice", "start", "error", "twice", setup="""
if bad:
    dist.init_process_group("{backend}")  # here""")
_add("unknown_interface", "start", "error", "nosuch0|interface|address", backends=("gloo",),
     top='if bad:\n    os.environ["GLOO_SOCKET_IFNAME"] = "nosuch0"')
_add("size_of_one_rank", "start", "", nobody=True,
     init="""
dist.init_process_group("{backend}", timeout=timeout, rank=LOCAL_RANK,
    world_size=WORLD + bad)  # here""")
_add("unknown_address", "start", "", "address|MASTER_ADDR|resolve|connect", sides=True,
     top='if bad:\n    os.environ["MASTER_ADDR"] = "no.such.host.invalid"')
_add("stopped_and_continued", "slow", "slow rank, nothing", guilty="bad", harmless=True, before="""
if now:
    subprocess.Popen(f"sleep 3; kill -CONT {os.getpid()}", shell=True)
    os.kill(os.getpid(), signal.SIGSTOP)""")
_add("all_exit_with_0", "slow", "nothing", guilty="none", nobody=True, harmless=True,
     end="sys.exit(0)")
_add("error_that_is_handled", "slow", "nothing", guilty="none", nobody=True, harmless=True,
     before="""
try:
    if now:
        raise ValueError("no cache")
except ValueError:
    pass""")
_add("group_of_some_ranks", "slow", "nothing", guilty="none", nobody=True, harmless=True,
     setup="group = dist.new_group([0, 1])",
     after="if rank < 2:\n    dist.all_reduce(torch.ones(2), group=group)")
# one line of code on the rank at fault, in one step
for _name, _kinds, _words, _line in (
    ("queue", AWAY, "", "__import__('queue').Queue().get()  # here"),
    ("event", AWAY, "", "threading.Event().wait()  # here"),
    ("accept", AWAY, "", "socket.create_server(('127.0.0.1', 0)).accept()  # here"),
    ("named_pipe", AWAY, "", "os.mkfifo('fifo') or open('fifo')  # here"),
    ("own_full_pipe", AWAY, "pipe", "os.write(os.pipe()[1], bytes(1 << 20))  # here"),
    ("future", AWAY, "", "ThreadPoolExecutor().submit(time.sleep, LONG).result()  # here"),
    ("coroutine", AWAY, "", "asyncio.run(asyncio.sleep(LONG))  # here"),
    ("debugger", AWAY, "", "breakpoint()"),
    ("backtracking", AWAY, "", "re.match('(a+)+$', 'a' * 33 + 'b')  # here"),
    ("disk_full", "error", "No space", "open('/dev/full', 'wb', 0).write(b'x')  # here"),
    ("group_of_errors", "error", "several", "raise ExceptionGroup('several', [OSError()])  # here"),
    ("command_that_fails", "error", "false", "subprocess.run(['false'], check=True)  # here"),
    ("cuda_on_one_rank", "error", "CUDA|NVIDIA", "torch.ones(1, device='cuda')  # here"),
    ("hangup", "died", "SIGHUP", "os.kill(os.getpid(), signal.SIGHUP)"),
    ("illegal_instruction", "crashed", "[Ii]llegal", "os.kill(os.getpid(), signal.SIGILL)"),
    ("segfault", "crashed", "[Ss]egmentation", "ctypes.string_at(0)  # here"),
    ("time_limit", "died", "SIGALRM", "[signal.alarm(1), time.sleep(LONG)]  # here"),
    ("exit_by_raise", ENDED, "no data left|exit", "raise SystemExit('no data left')"),
    ("interrupted_alone", "error, died", "SIGINT", "os.kill(os.getpid(), signal.SIGINT)"),
):
    _add(_name, "away" if _kinds == AWAY else "ends", _kinds, _words,
         top="import asyncio, re, socket\nfrom concurrent.futures import ThreadPoolExecutor",
         before=f"if now:\n    {_line}")
_add("exit_of_all", "ends", "", "exit|loss", nobody=True, guilty="none",
     before='if step == AT:\n    raise SystemExit("the loss is not finite")')
_add("same_error_on_all", "ends", "", "KeyError|config", nobody=True, guilty="none",
     before='if step == AT:\n    raise KeyError("config")  # here')
_add("exit_before_the_start", "start", ENDED + ", start-up", "exit|ended|started",
     top="if bad:\n    sys.exit(0)  # here")
_add("key_of_the_store", "away", AWAY + ", error", before="""
if now:
    store = dist.FileStore("keys", WORLD)
    store.set_timeout(timedelta(seconds=LONG))
    store.get("never set")  # here""")
# fmt: on
