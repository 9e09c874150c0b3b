"""Long work in small pieces: numbered blocks in a folder, each made once, by any worker, and found again after a kill.

A stage is a folder. Its blocks are files that carry their number and the hash of their content in their name, so a block
is whole or absent, and can be checked by itself. A manifest is written last: where it lies, the stage is finished.
Everything in this package that must be on the disk whole or not at all, or must not be worked on twice, uses what is here.
"""

import fcntl, hashlib, itertools, json, multiprocessing, os, pickle, platform, shutil, signal, threading, time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
import numpy as np
import pyarrow, pyarrow.parquet
from .budget import UserError


# Files and folders, whole or not at all

def digest(path: Path) -> str:
    "SHA-256 of a file."
    with open(path, "rb") as file: return hashlib.file_digest(file, "sha256").hexdigest()

def sync(path: Path):
    "Have the operating system put a file or folder on the disk now."
    handle = os.open(path, os.O_RDONLY)
    try: os.fsync(handle)
    finally: os.close(handle)

def discard(path: Path):
    "Remove a file or a folder, if it is there."
    if path.is_dir(): shutil.rmtree(path)
    else: path.unlink(missing_ok=True)

def sweep(folder: Path):
    "Remove what processes that were killed have left half-written in a folder that is ours alone."
    for part in folder.glob(".part-*"): discard(part)

@contextmanager
def whole(path: Path, sealed: bool = False) -> Iterator[Path]:
    "A hidden name to write a file or folder under; it becomes `path`, or `path` with its hash, if the block ends well, and disappears if not."
    part = path.with_name(f".part-{os.getpid()}-{path.name}")
    try:
        yield part
        part.replace(path.with_stem(f"{path.stem}-{digest(part)[:16]}") if sealed else path)
    finally: discard(part)

def write_text(path: Path, text: str):
    "Write a small file whole or not at all, and have it on the disk."
    with whole(path) as part:
        part.write_text(text)
        sync(part)

_held = set()  # folders that this process has locked: it may enter them again

class Busy(UserError):
    "Another process holds a folder."

@contextmanager
def lock(folder: Path, wait: bool = False) -> Iterator[None]:
    "Hold a folder, made if it is missing, against other processes: wait for them, or be refused; the lock ends with its process, however that ends."
    folder = folder.resolve()
    if folder in _held: return (yield)
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / ".lock", "a+") as file:
            try: fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise Busy(f"{folder.name}: another process ({file.read()}) is at work on this run; wait for it, or choose another --name") from None
            if not Path(file.name).exists() or not os.path.samestat(os.fstat(file.fileno()), os.stat(file.name)): continue  # it was deleted meanwhile
            file.truncate(0)
            print(os.getpid(), "on", platform.node(), end="", file=file, flush=True)
            _held.add(folder)
            try: return (yield)
            finally:
                _held.remove(folder)
                file.truncate(0)

class LostWorker(UserError):
    "A worker process is gone; what the others finished stays."

def damaged(path: Path) -> UserError:
    "What to say of a file that is not what was written."
    return UserError(f"{path} is damaged; delete the folder {path.parent} and run again")


# Blocks

def checked(path: Path) -> Path:
    "The path of a block, if its content is what its name says."
    if not path.exists() or digest(path)[:16] != path.stem[-16:]: raise damaged(path)
    return path

def made(folder: Path, name: str = "", suffix: str = ".parquet") -> set[str]:
    "The blocks that are there already, by the part of their name before the hash."
    return {path.stem[:-17] for path in blocks(folder, suffix, name)}

def blocks(folder: Path, suffix: str = ".parquet", name: str = "") -> list[Path]:
    "The blocks of a folder, in the order of their numbers."
    return sorted(p for p in Path(folder).glob(f"{name}*-{'?' * 16}{suffix}") if p.name[0] != ".")

def write_table(path: Path, columns: dict, **notes):
    "Write a batch, a dict of columns, as a Parquet block; notes go into its metadata."
    table = pyarrow.table(columns).replace_schema_metadata({key: json.dumps(value) for key, value in notes.items()})
    with whole(path, sealed=True) as part: pyarrow.parquet.write_table(table, part, compression="lz4", use_dictionary=False, write_statistics=False)

def read_table(path: Path, columns: list[str] | None = None) -> pyarrow.Table:
    "Read columns of a block."
    try:
        with pyarrow.parquet.ParquetFile(path) as file: return file.read(columns, use_threads=False)
    except (OSError, ValueError): raise damaged(path) from None


# Stages

def finished(folder: Path) -> dict | None:
    "The manifest of a stage, or None if the stage is not finished."
    path = Path(folder) / "manifest.json"
    if not path.exists(): return None
    try: return json.loads(path.read_text())
    except ValueError: raise damaged(path) from None

def run_stage(folder: Path, make: Callable[[Path], dict]) -> dict:
    "The manifest of a stage: what `make(folder)` says of the blocks it makes, unless they are there; after a kill those that were finished are kept."
    if found := finished(folder): return found
    with lock(folder, wait=True):
        if found := finished(folder): return found  # somebody else was faster
        sweep(folder)
        begun = time.perf_counter()
        try: found = make(folder) | dict(seconds=time.perf_counter() - begun)
        except UserError as error:
            if not isinstance(error, LostWorker): shutil.rmtree(folder, ignore_errors=True)  # with other input it would be another folder
            raise
        write_text(folder / "manifest.json", json.dumps(found, indent=1))
    return found


# Rows in shards

SHARD = 1 << 27  # bytes

def by_shard(chunks: Iterable[np.ndarray], size: int) -> Iterator[tuple[int, np.ndarray]]:
    "Rows in pieces that lie in one shard each, with its number; a shard holds `size` rows."
    done = 0
    for chunk in chunks:
        while len(chunk):
            number, place = divmod(done, size)
            piece, chunk = chunk[:size - place], chunk[size - place:]
            yield number, piece
            done += len(piece)

def write_shards(folder: Path, name: str, chunks: Iterable[np.ndarray], size: int):
    "Write rows to shards of `size` rows; those that are there stay."
    have = made(folder, name, ".bin")
    for number, group in itertools.groupby(by_shard(chunks, size), lambda pair: pair[0]):
        path = folder / f"{name}-{number:05}.bin"
        if path.stem in have: continue
        with whole(path, sealed=True) as part, open(part, "wb") as file:
            for _, piece in group: file.write(np.ascontiguousarray(piece))

class Rows:
    "Token rows on disk, [rows, seq_length], read like one array wherever the shards end."
    def __init__(self, paths: list[Path], shape: list[int], dtype: str, size: int):  # size: rows a shard
        self.shape, self.dtype, self.size = tuple(shape), np.dtype(dtype), size
        for first, path in zip(range(0, shape[0], size), paths):  # bytes are counted here, and hashed by `Corpus.verify`
            if not path.exists() or path.stat().st_size != min(size, shape[0] - first) * shape[1] * self.dtype.itemsize: raise damaged(path)
        self.shards = [np.memmap(path, dtype, "r").reshape(-1, shape[1]) for path in paths]

    def __len__(self) -> int: return self.shape[0]

    def __getitem__(self, index) -> np.ndarray:
        if isinstance(index, slice): index = np.arange(*index.indices(len(self)))
        numbers = np.asarray(index)
        if numbers.ndim == 0: return self[numbers[None]][0]
        if ((numbers < -len(self)) | (numbers >= len(self))).any(): raise IndexError(f"row {index} of {len(self)}")
        shards, places = np.divmod(np.where(numbers < 0, numbers + len(self), numbers), self.size)
        found = np.empty((len(numbers), self.shape[1]), self.dtype)
        for shard in np.unique(shards): found[shards == shard] = self.shards[shard][places[shards == shard]]
        return found

    def __array__(self, dtype=None, copy=None) -> np.ndarray: return np.asarray(self[:], dtype)

def read_shards(paths: list[Path], seq_length: int, dtype) -> Iterator[np.ndarray]:
    "The rows of shards, some thousands at a time."
    for path in paths:
        with open(path, "rb") as file:
            while len(rows := np.fromfile(file, dtype, seq_length << 13)): yield rows.reshape(-1, seq_length)

def gather_rows(paths: list[Path], numbers: np.ndarray, seq_length: int, dtype, size: int) -> Iterator[np.ndarray]:
    "Rows by their numbers, from shards of `size` rows, some thousands at a time."
    files, width = [os.open(path, os.O_RDONLY) for path in paths], seq_length * np.dtype(dtype).itemsize
    try:
        for some in np.split(numbers, range(1 << 13, len(numbers), 1 << 13)):
            places = zip(*(part.tolist() for part in np.divmod(some, size)))
            yield np.frombuffer(b"".join([os.pread(files[shard], width, width * place) for shard, place in places]), dtype).reshape(-1, seq_length)
    finally:
        for file in files: os.close(file)


# Workers

def follow_parent():
    "In a worker: leave interrupts to the parent, and end when it does, even if it was killed."
    def wait():
        multiprocessing.parent_process().join()
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=wait, daemon=True).start()

class Local:
    "Runs functions on this machine's cores. A single job runs in this process; further ones start a pool, once."
    def __init__(self, count: int = 0):  # processes; 0: as many as there are cores for us
        self.count, self.pool = count or len(os.sched_getaffinity(0)), None

    def __enter__(self): return self

    def __exit__(self, *error):
        if self.pool: self.pool.shutdown(cancel_futures=True)

    def map(self, f: Callable, jobs: Iterable[tuple]) -> Iterator:
        "The results of f(*job), in order; no more jobs are drawn than keep the workers busy."
        jobs = iter(jobs)
        head = list(itertools.islice(jobs, 2))
        if self.count == 1 or len(head) < 2: yield from itertools.starmap(f, itertools.chain(head, jobs))
        else: yield from self.spread(f, itertools.chain(head, jobs))

    def spread(self, f: Callable, jobs: Iterable[tuple]) -> Iterator:
        self.pool = self.pool or ProcessPoolExecutor(self.count, multiprocessing.get_context("spawn"), follow_parent)
        waiting = deque()
        try:
            for job in jobs:
                waiting.append(self.pool.submit(f, *job))
                if len(waiting) > self.count + 1: yield waiting.popleft().result()
            while waiting: yield waiting.popleft().result()
        except BrokenProcessPool:
            raise LostWorker("a worker process ended before its work did: it ran out of memory, or a script of your own does not "
                            "keep its first call under `if __name__ == '__main__':`") from None

def unpack_and_run(row: dict) -> dict:
    "A row of a Ray dataset: a packed job, which becomes its packed result, or the mistake it found in its input."
    f, job = pickle.loads(row["job"])
    try: result = f(*job)
    except UserError as error: result = error
    return dict(number=row["number"], result=pickle.dumps(result))

class Ray:
    "Runs the same functions with Ray Data, on this machine or a cluster; the data folder must be one that all of it sees."
    def __enter__(self):
        try: import ray.data
        except ImportError: raise UserError("the engine ray needs Ray: pip install 'cramming_nb[ray]'") from None
        if not ray.is_initialized(): ray.init(log_to_driver=False)
        ray.data.DataContext.get_current().enable_progress_bars = False
        self.ray = ray
        return self

    def __exit__(self, *error): pass

    def map(self, f: Callable, jobs: Iterable[tuple]) -> Iterator:
        "The results of f(*job), in order."
        packed = [dict(number=i, job=pickle.dumps((f, job))) for i, job in enumerate(jobs)]
        if not packed: return
        rows = self.ray.data.from_items(packed, override_num_blocks=len(packed)).map(unpack_and_run).take_all()
        for row in sorted(rows, key=lambda row: row["number"]):
            result = pickle.loads(row["result"])
            if isinstance(result, UserError): raise result
            yield result

ENGINES = dict(local=Local, ray=Ray)
