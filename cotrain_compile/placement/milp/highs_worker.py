"""HiGHS at work: the script of a process that solves one program after the other.

Programs come on standard input, answers go to standard output. Each message is two lengths in eight
bytes each, then so much JSON and so many bytes of arrays. The process ends with the one that
started it, whatever HiGHS is at, and when nothing has come for a while. It imports nothing of this
package.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Mapping
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

IDLE_S = 60.0
LARGE_ROWS = 1000
SHORTEST_S = 0.05  # between two looks at the processor's time
# What HiGHS has not come back from says nothing of the program.
STUCK = "stuck"
NO_ANSWER = {
    "status": STUCK,
    "has_values": False,
    "objective": math.inf,
    "dual_bound": -math.inf,
    "pivots": 0,
    "barrier_steps": 0,
    "checks": 0,
    "col_value": np.empty(0),
}

Message = Mapping[str, Any]


def packed(message: Message) -> bytes:
    """`message` as bytes: arrays of one dimension, and what JSON can say."""
    arrays = {name: value for name, value in message.items() if isinstance(value, np.ndarray)}
    kinds = {name: (array.dtype.str, len(array)) for name, array in arrays.items()}
    others = {name: value for name, value in message.items() if name not in arrays}
    head = json.dumps([kinds, others]).encode()
    body = b"".join(array.tobytes() for array in arrays.values())
    return len(head).to_bytes(8, "little") + len(body).to_bytes(8, "little") + head + body


def received(stream: Any) -> dict[str, Any] | None:
    """The next message of `stream`, a file; None where it ends before the message does."""
    sizes = stream.read(16)
    head_bytes, body_bytes = (
        int.from_bytes(sizes[:8], "little"),
        int.from_bytes(sizes[8:], "little"),
    )
    data = stream.read(head_bytes + body_bytes)
    if len(sizes) < 16 or len(data) < head_bytes + body_bytes:
        return None
    kinds, message = json.loads(data[:head_bytes])
    at = head_bytes
    for name, (dtype, length) in kinds.items():
        message[name] = np.frombuffer(data, dtype, length, at)
        at += message[name].nbytes
    return dict(message)


def solved(program: Message) -> dict[str, Any]:
    """What HiGHS finds for `program`, whose fields are those of `highs_process.solve_elsewhere`."""
    import highspy

    highs: Any = highspy.Highs()  # type: ignore[no-untyped-call]
    highs.setOptionValue("output_flag", False)
    # HiGHS keeps its threads from one program to the next, and refuses one that asks for others.
    highs.resetGlobalScheduler(True)
    for name, value in program["options"].items():
        highs.setOptionValue(name, value)
    model = _model(program)
    highs.passModel(model)
    if len(program["start_index"]):
        highs.setSolution(
            len(program["start_index"]), program["start_index"], program["start_value"]
        )
    if len(program["integrality"]):
        done = _solve_tree(highs, program["checks"])
    else:
        done = _solve_one(highs, program["pivots"], program["barrier_steps"])
    status, solution, info = highs.getModelStatus(), highs.getSolution(), highs.getInfo()
    kinds, objective = highspy.HighsModelStatus, highs.getObjectiveValue()
    if status == kinds.kInterrupt:  # after as many checks as were allowed
        status = kinds.kIterationLimit
    stopped = status in (kinds.kIterationLimit, kinds.kTimeLimit, kinds.kObjectiveBound)
    return {
        "status": str(highs.modelStatusToString(status)).lower(),
        "has_values": status == kinds.kOptimal or (stopped and math.isfinite(objective)),
        "objective": objective,
        "dual_bound": info.mip_dual_bound,
        **done,
        "col_value": np.array(solution.col_value, dtype=np.float64),
    }


def _solve_one(highs: Any, pivots: int, barrier_steps: int) -> dict[str, int]:
    """A program without whole columns: most by a barrier, with so many steps, and crossover.

    The simplex method takes a tenth to twice as long. Of some programs of 6,000 rows that have no
    solution it takes a second for each pivot, though, and no limit of pivots ends that.
    """
    highs.setOptionValue("simplex_iteration_limit", pivots)
    if highs.getNumRow() >= LARGE_ROWS:
        highs.setOptionValue("solver", "ipm")
        highs.setOptionValue("ipm_iteration_limit", barrier_steps)
    highs.run()
    info = highs.getInfo()
    counts = (info.simplex_iteration_count, info.crossover_iteration_count)
    return {
        "pivots": sum(max(0, count) for count in counts),
        "barrier_steps": max(0, info.ipm_iteration_count),
        "checks": 0,
    }


def _solve_tree(highs: Any, most: int) -> dict[str, int]:
    """A program with whole columns, left when HiGHS has asked so often whether it is to go on.

    It asks at the same points in every run, between rounds of cuts, heuristics and nodes. Its own
    limits of work are of nodes alone, before the first of which it may do most of what it does.
    """
    checks = 0

    def check(event: Any) -> None:
        nonlocal checks
        checks += 1
        if checks > most:
            event.interrupt()

    highs.cbMipInterrupt.subscribe(check)
    highs.run()
    pivots = max(0, highs.getInfo().simplex_iteration_count)
    return {"pivots": pivots, "barrier_steps": 0, "checks": checks}


def _model(program: Message) -> Any:
    import highspy

    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(program["col_cost"]), len(program["row_lower"])
    lp.offset_ = program["offset"]
    for name in ("col_cost", "col_lower", "col_upper", "row_lower", "row_upper"):
        setattr(lp, f"{name}_", program[name])
    kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
    lp.integrality_ = [kinds[is_whole] for is_whole in program["integrality"]]
    matrix = lp.a_matrix_
    matrix.format_ = highspy.MatrixFormat.kRowwise
    matrix.num_col_, matrix.num_row_ = lp.num_col_, lp.num_row_
    matrix.start_, matrix.index_ = program["start"], program["index"]
    matrix.value_ = program["value"]
    return lp


def _listen(programs: SimpleQueue[dict[str, Any]]) -> None:
    """Pass on what comes; the end of it is that of the process that sent it."""
    with os.fdopen(0, "rb") as stream:
        while (program := received(stream)) is not None:
            programs.put(program)
        os._exit(0)


class _Answer:
    """The one answer to a program: HiGHS', or that it is stuck, after which the process ends.

    Of a badly scaled program HiGHS may repeat one pivot for ever, where none of its limits but that
    of the clock ends it. The processor's time, unlike that, is the same beside any load.
    """

    def __init__(self, answers: Any, patience_s: float) -> None:
        self._answers, self._lock, self._is_there = answers, threading.Lock(), threading.Event()
        self._end_s = time.process_time() + patience_s
        threading.Thread(target=self._watch, daemon=True).start()

    def give(self, answer: Message) -> None:
        """This is it."""
        with self._lock:
            self._is_there.set()
            self._answers.write(packed(answer))
            self._answers.flush()

    def _watch(self) -> None:
        while (left_s := self._end_s - time.process_time()) > 0.0:
            if self._is_there.wait(max(left_s, SHORTEST_S)):
                return
        with self._lock:
            if not self._is_there.is_set():
                self._answers.write(packed(NO_ANSWER))
                self._answers.flush()
                os._exit(0)


def main() -> None:
    """Solve what comes, until nothing does."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a library that prints must not come between two answers
    programs: SimpleQueue[dict[str, Any]] = SimpleQueue()
    threading.Thread(target=_listen, args=(programs,), daemon=True).start()
    while True:
        try:
            program = programs.get(timeout=IDLE_S)
        except Empty:
            os._exit(0)
        answer = _Answer(answers, program["patience_s"])
        try:
            answer.give(solved(program))
        except Exception as error:  # told by the process that asked
            answer.give({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
