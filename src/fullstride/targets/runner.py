"""Times exported files on its machine for fullstride on another machine.

fullstride joins the texts of `sessions.py` and this file, without the import between them, and
sends them to a Python there, so nothing is installed; they need NumPy and one of the runtimes. The
program reads requests from standard input and answers on standard output, each a line of JSON.
Files stay in a temporary folder until it ends. It runs no code from a file.
"""

# Old boards have Python 3.9, so both files use nothing newer, and import nothing of fullstride.
import base64
import hashlib
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import numpy as np

from fullstride.targets.sessions import OPEN, PACKAGES


def read(path: str) -> str:
    """The text of a small system file; "" if there is none."""
    try:
        return Path(path).read_text(errors="replace")[:100_000].strip("\0\n ")
    except OSError:
        return ""


def number(path: str):
    """A number / 1000, such as kHz to MHz; None if the file has no number."""
    text = read(path)
    return float(text) / 1e3 if text.isdigit() else None


def processor() -> str:
    """The system's name for the model of the processor or board."""
    for line in read("/proc/cpuinfo").splitlines():
        if line.lower().startswith("model name"):
            return line.partition(":")[2].strip()
    return read("/proc/device-tree/model") or platform.processor() or platform.machine()


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def state() -> dict:
    """The state that changes under load, with None for unknown values."""
    frequency = "/sys/devices/system/cpu/cpu0/cpufreq/"
    zones = Path("/sys/class/thermal").glob("thermal_zone*/temp")
    temperatures = [number(str(zone)) or 0.0 for zone in zones]
    return {
        "governor": read(frequency + "scaling_governor") or None,
        "clock_mhz": number(frequency + "scaling_cur_freq"),
        "clock_max_mhz": number(frequency + "cpuinfo_max_freq"),
        "temperature_c": max(temperatures, default=0.0) or None,
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def runtimes() -> tuple[dict, dict]:
    """The versions of runtimes by format, and why other runtimes cannot be imported."""
    versions, missing = {}, {}
    for name, package in PACKAGES.items():
        try:
            module = import_module(package.replace("-", "_"))
            versions[name] = getattr(module, "__version__", None) or version(package)
        except Exception as error:  # a broken library may raise anything
            missing[name] = one_line(error)
    return {name: each.split("-")[0] for name, each in versions.items()}, missing


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


class Runner:
    """An operation for each kind of request, which returns the answer."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.sessions: dict = {}  # (name, threads) -> function of a batch
        names = ("hello", "put", "remove", "run", "measure", "noise")
        self.operations = {name: getattr(self, name) for name in names}

    def hello(self, request: dict) -> dict:
        versions, missing = runtimes()
        return {
            "machine": {
                "processor": processor(),
                "machine": platform.machine(),
                "cores": cores(),
                "runtimes": versions,
            },
            "state": state(),
            "os": platform.platform(),
            "python": platform.python_version(),
            "numpy": np.__version__,
            "missing": missing,
            "free_mib": shutil.disk_usage(self.folder).free // 2**20,
        }

    def path(self, name: str) -> Path:
        """The path of a sent file; `name` is a file, or a folder and a file in it."""
        parts = name.split("/")
        if not 1 <= len(parts) <= 2 or any(part in ("", ".", "..") for part in parts):
            raise ValueError(f"{name!r} is no name of a file")
        return self.folder.joinpath(*parts)

    def put(self, request: dict) -> dict:
        """Append a part of a file; the last part comes with the digest of the whole."""
        path = self.path(request["name"])
        path.parent.mkdir(exist_ok=True)
        with path.open("ab" if request["offset"] else "wb") as file:
            if file.tell() != request["offset"]:
                raise ValueError(f"{request['name']} has {file.tell()} bytes")
            file.write(base64.b64decode(request["data"]))
        digest = request.get("sha256")
        if digest and hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            path.unlink()
            raise ValueError(f"{request['name']} was damaged on its way")
        return {}

    def remove(self, request: dict) -> dict:
        self.sessions.clear()
        for path in self.folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        return {}

    def open(self, file: dict, threads: int):
        """Open a file once by its format's runtime, as a function of a batch."""
        key = file["name"], threads
        if key not in self.sessions:
            path = str(self.path(file["name"]))
            self.sessions[key] = OPEN[file["format"]](path, threads, file["precision"])
        return self.sessions[key]

    def run(self, request: dict) -> dict:
        """The outputs of a file for inputs, or of the first `rows` alone, as base64 of <f4."""
        dtype = np.dtype(request["dtype"]).newbyteorder("<")
        inputs = np.frombuffer(base64.b64decode(request["data"]), dtype).reshape(request["shape"])
        infer = self.open(request["file"], request["threads"] or cores())
        outputs = np.ascontiguousarray(infer(inputs)[: request.get("rows")], "<f4")
        return {"shape": outputs.shape, "data": base64.b64encode(outputs.tobytes()).decode()}

    def measure(self, request: dict) -> dict:
        """Milliseconds of every call of each file, measured in turn in every round."""
        threads, before = request["threads"] or cores(), state()
        steps = {
            file["name"]: partial(self.open(file, threads), random_inputs(file))
            for file in request["files"]
        }
        return {"ms": in_turn(steps, request), "before": before, "after": state()}

    def noise(self, request: dict) -> dict:
        """Milliseconds of calls of one fixed computation on one core, without a runtime."""
        values = np.ones(100_000, np.float32)
        return {"ms": in_turn({"values": partial(np.sqrt, values)}, request)}


def random_inputs(file: dict):
    images = np.random.default_rng(0).integers(256, size=file["shape"], dtype=np.uint8)
    return images if file["dtype"] == "uint8" else images.astype(np.float32) / 128 - 1


def in_turn(steps: dict, request: dict) -> dict:
    """Milliseconds of each step's calls, without the first call of a round, with cold caches."""
    calls = {name: warm_up(step, request) for name, step in steps.items()}
    ms: dict = {name: [] for name in steps}
    for _ in range(request["rounds"]):
        for name, step in steps.items():
            step()
            for _ in range(calls[name]):
                start = time.perf_counter()
                step()
                ms[name].append(1e3 * (time.perf_counter() - start))
    return ms


def warm_up(step, request: dict) -> int:
    """Run for `warmup_s`; return the number of calls that take `round_s`."""
    step()  # chooses algorithms
    start, calls = time.perf_counter(), 0
    while calls == 0 or time.perf_counter() < start + request["warmup_s"]:
        step()
        calls += 1
    seconds = (time.perf_counter() - start) / calls
    return max(1, round(request["round_s"] / seconds))


def too_long(*_) -> None:
    raise TimeoutError("it took longer than its limit")


def main() -> None:
    # Libraries print to standard error, so that standard output has only answers.
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    # Threads of ncnn would wait busily: beside other programs a call would take seconds.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    signal.signal(signal.SIGALRM, too_long)
    with (
        os.fdopen(os.dup(1), "w", encoding="utf-8") as answers,
        tempfile.TemporaryDirectory(prefix="fullstride") as folder,
    ):
        os.dup2(2, 1)
        runner = Runner(Path(folder))
        for line in sys.stdin.buffer:
            try:
                request = json.loads(line)
                signal.setitimer(signal.ITIMER_REAL, request["limit_s"])
                answer = runner.operations[request["op"]](request)
            except Exception as error:  # a runtime may raise anything; the next request may work
                answer = {"error": one_line(error)}
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
