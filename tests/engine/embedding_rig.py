"""Two engines and their ranks in one process, with transfers of image embeddings between the engines.

The transfer classes, frames, rank transfers and sockets are real. The schedulers are fakes, which hold blocks
and record the events they receive.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zmq

from tests.disagg.transport.rig import LateCopies
from tests.support.slowness import deadline
from weft.common.clock import SystemClock
from weft.common.errors import Unavailable
from weft.config.sharding import balanced_share
from weft.disagg.protocol.group_layout import blocks_of, embedding_dims
from weft.disagg.protocol.pushes import Write
from weft.disagg.protocol.transfer_table import TransferPatience
from weft.disagg.transport.reports import TransferReports
from weft.disagg.transport.shared_memory import SharedMemory
from weft.disagg.transport.shm import ShmTransport
from weft.disagg.transport.staging_memory import Sizes, Staged
from weft.disagg.transport.tcp import TcpTransport
from weft.disagg.transport.transfer_thread import RankTransfer
from weft.engine.disagg.engine_transfers import EngineTransfers
from weft.engine.disagg.group_transfers import GroupTransfers, RankEvent
from weft.engine.disagg.transfer_channel import ZmqTransferChannel
from weft.engine.event_sources import EmbeddingSource
from weft.engine.ranks.worker_transfers import WorkerTransfers
from weft.runner.images.media_departures import Departures
from weft.types import frames as f
from weft.types import transfer as r
from weft.types.media_item import BLOCK_ROWS
from weft.types.messages import TokenEvent
from weft.types.plan import SendMedia
from weft.types.transfer import GroupDims, Peer, TransferKey, TransferParameters

LEVELS, WIDTH, BLOCKS = 3, 8, 64
ROW = LEVELS * WIDTH * 4
"""Bytes of one row, in float32."""
SECRET = b"sixteen bytes at least"
SECONDS = deadline(30.0)
PATIENCE = TransferPatience(retry=0.2, bind=30.0, fence=3.0, stop=0.5)
BROKEN = Unavailable("planted").info()


class Rank:
    """The embedding pool, the transport and the thread of one rank."""

    def __init__(
        self, kind: str, folder: Path, number: int, dims: GroupDims, incarnation: int, small: bool = False
    ) -> None:
        """Start a rank. With ``small`` each write and each window has room for a few rows only."""
        (tensor,) = dims.kinds[0].tensors
        shape = [size for _, size in tensor.dims]
        self.memory = SharedMemory(int(np.prod(shape)) * 4)
        self.pool = self.memory.tensor.view(torch.float32).view(shape)
        self.pool.fill_(-1.0)
        staged, kind = kind.startswith("staged"), kind.removeprefix("staged ")
        self.transport: Any
        if kind == "shm":
            self.transport = ShmTransport(str(folder), number, incarnation)
        else:
            self.transport = TcpTransport("127.0.0.1", number, incarnation, SECRET)
        if staged:
            sizes = Sizes(slot=10 * ROW, slots=4, inbox=1 << 16)
            self.transport.stage(Staged([self.memory.tensor], LateCopies(), sizes, sends=True, takes=True))
        elif kind == "shm":
            self.transport.share([self.memory])
        else:
            self.transport.register([self.memory.tensor])
        if small:
            self.transport.write_bytes, self.transport.window_bytes = 10 * ROW, 25 * ROW
        self.sent_bytes = self.writes = 0
        write = self.transport.write

        def counted(one: Write) -> None:
            self.writes += 1
            self.sent_bytes += sum(part.nbytes for part in one.parts)
            write(one)

        self.transport.write = counted
        self.reports = TransferReports()
        self.transfer = RankTransfer(number, dims, self.transport, self.reports.tell)
        self.leaves = Departures(self.transfer, LEVELS)
        self.transfers = WorkerTransfers(number, "embeddings")

    def rows(self, blocks: list[int], count: int) -> np.ndarray:
        """Return the first ``count`` rows in ``blocks``: [levels, count, width]."""
        rows: np.ndarray = self.pool[:, blocks].flatten(1, 2)[:, :count].numpy()
        return rows

    def close(self) -> None:
        self.transfer.close()
        self.reports.close()
        self.memory.close()


class Group:
    """``TransferRanks``: the engine's own rank, and further ranks that receive frames."""

    def __init__(
        self, kind: str, folder: Path, dims: GroupDims, incarnation: int, small: bool = False
    ) -> None:
        self.members = [
            Rank(kind, folder, number, dims, incarnation + number, small) for number in range(dims.ranks)
        ]
        own = self.members[0]
        self.transfers = GroupTransfers(
            own.transfer,
            own.reports,
            lambda: [rank.transport.endpoint for rank in self.members],
            {number: number for number in range(1, dims.ranks)},
            self._frame,
            cache="embeddings",
        )
        self.deaf: set[int] = set()
        """Ranks whose process has ended."""
        self.late: list[tuple[int, f.TransferToRank]] | None = None
        """Frames that are held back; None to deliver frames at once."""
        self.dims, self.ranks = self.transfers.dims, self.transfers.ranks

    @property
    def sockets(self) -> Sequence[Any]:
        return [rank.reports.descriptor for n, rank in enumerate(self.members) if n not in self.deaf]

    def endpoints(self) -> tuple[r.Endpoint, ...] | None:
        return self.transfers.endpoints()

    def send(self, frame: f.TransferToRank) -> None:
        self.transfers.send(frame)

    def _frame(self, number: int, data: bytes) -> None:
        frame = f.decode_to_rank(data)
        assert isinstance(frame, f.TransferToRank)
        assert frame.cache == "embeddings"
        if self.late is not None:
            self.late.append((number, frame))
        elif number not in self.deaf:
            self.members[number].transfers.take(frame, self.members[number].transfer)

    def deliver(self) -> None:
        """Deliver the frames that were held back."""
        late, self.late = self.late or [], None
        for number, frame in late:
            self._frame(number, f.encode(frame))

    def take(self) -> list[RankEvent]:
        for number, rank in enumerate(self.members[1:], 1):
            for frame in rank.transfers.frames_of(rank.reports.take() if number not in self.deaf else []):
                self.transfers.report(frame)
        return self.transfers.take()

    def kill(self, number: int) -> None:
        """End the process of a rank other than the engine's own rank."""
        self.deaf.add(number)
        self.members[number].transfer.close()
        self.transfers.ended(number)


class Scheduler:
    """The scheduler of either end, as the embedding transfers see a scheduler."""

    def __init__(self) -> None:
        self.embeddings = self
        self.requests: deque[r.TransferRequest] = deque()
        self.reported: list[r.TransferEvent] = []
        self.blocks: dict[TransferKey, list[int]] = {}
        """Transfer -> blocks in use."""
        self.held: dict[TransferKey, int] = {}
        """Transfers whose rows the receiver already has -> number of rows."""
        self.postpone: set[TransferKey] = set()

    def kinds(self, key: TransferKey) -> list[str]:
        return [type(event).__name__ for event in self.reported if event.key == key]

    def error(self, key: TransferKey) -> str:
        (failed,) = [e for e in self.reported if isinstance(e, r.TransferFailed) and e.key == key]
        return failed.error.message

    def transfer_requests(self) -> list[r.TransferRequest]:
        asked = list(self.requests)
        self.requests.clear()
        return asked

    def transfer_blocks(self, key: TransferKey) -> tuple[r.Blocks, ...]:
        """Return the blocks of a sender before the image is encoded: none."""
        return ()

    def transfer(self, event: r.TransferEvent, now: float) -> list[TokenEvent]:
        self.reported.append(event)
        key = event.key
        if isinstance(event, r.TransferWanted):
            if key in self.postpone:
                self.requests.append(r.PostponeTransfer(key, 0.05))
            else:
                start = self.held.get(key, 0)
                blocks = (blocks_of(self.blocks.get(key, [])),)
                self.requests.append(r.ReserveTransfer(key, start, blocks))
        elif isinstance(event, r.TransferReceived | r.TransferFreed):
            self.blocks.pop(key, None)
        return []


class Engine:
    """One end of the transfers."""

    def __init__(
        self, sends: bool, kind: str, folder: Path, dims: GroupDims, incarnation: int, small: bool = False
    ) -> None:
        self.group = Group(kind, folder, dims, 100 * incarnation, small)
        channel = ZmqTransferChannel(f"ipc://{folder}/h{incarnation}", incarnation)
        self.scheduler = Scheduler()
        self.transfers = EngineTransfers(
            sends, self.group, channel, incarnation=incarnation, clock=SystemClock(), patience=PATIENCE
        )
        self.source = EmbeddingSource(self.transfers)
        self.peer = Peer(channel.address, incarnation)

    def turn(self) -> None:
        self.source.take(self.scheduler)

    def close(self) -> None:
        self.transfers.close()
        for number, rank in enumerate(self.group.members):
            if number not in self.group.deaf:
                rank.close()


class Pair:
    """An encode group and a group that receives embeddings."""

    def __init__(
        self,
        kind: str,
        folder: Path,
        ranks: tuple[int, int] = (1, 1),
        shards: bool = False,
        small: bool = False,
        seed: int = 0,
    ) -> None:
        both = (embedding_dims(LEVELS, WIDTH, BLOCKS, n, "float32", shards) for n in ranks)
        self.sender, self.receiver = (
            Engine(number == 0, kind, folder, dims, 7 + number, small) for number, dims in enumerate(both)
        )
        self.shards = shards
        self.rng = np.random.default_rng(seed)
        self.images: dict[TransferKey, tuple[np.ndarray, list[int], list[int]]] = {}
        """Transfer -> (embedding [levels, rows, width], blocks of the sender, blocks of the receiver)."""

    @property
    def engines(self) -> tuple[Engine, Engine]:
        return self.sender, self.receiver

    def free(self, engine: Engine) -> list[int]:
        """Return the blocks of ``engine`` that no transfer may touch."""
        taken = {block for blocks in engine.scheduler.blocks.values() for block in blocks}
        return [block for block in range(1, BLOCKS + 1) if block not in taken]

    def image(self, rows: int, transfer: int | None = None, attempt: int = 0) -> TransferKey:
        """Choose an embedding and a transfer key. Neither end knows the transfer yet; nothing is computed."""
        transfer = len(self.images) if transfer is None else transfer
        key = TransferKey(transfer, attempt, self.sender.peer.incarnation)
        value = self.rng.standard_normal((LEVELS, rows, WIDTH)).astype(np.float32)
        tables = []
        for engine in self.engines:
            free = self.free(engine)
            self.rng.shuffle(free)
            tables.append(free[: -(-rows // BLOCK_ROWS)])
            engine.scheduler.blocks[key] = tables[-1]
        self.images[key] = value, tables[0], tables[1]
        return key

    def open(
        self, key: TransferKey, seconds: float = 60.0, receiver: bool = True, sender: bool = True
    ) -> None:
        if sender:
            self.sender.transfers.open(TransferParameters(key, True, self.receiver.peer, seconds))
            self.sender.scheduler.requests.append(r.OfferTransfer(key, self.images[key][0].shape[1], 0))
        if receiver:
            self.receiver.transfers.open(TransferParameters(key, False, self.sender.peer, seconds))

    def compute(self, key: TransferKey, finish: bool = True) -> None:
        """Write the embedding at all ranks of the sender. With ``finish`` also release it for sending."""
        value, blocks, _ = self.images[key]
        rows = value.shape[1]
        for rank in self.sender.group.members:
            index = torch.tensor(blocks).repeat_interleave(BLOCK_ROWS)[:rows] * BLOCK_ROWS
            index += torch.arange(rows) % BLOCK_ROWS
            rank.pool.flatten(1, 2).index_copy_(1, index, torch.from_numpy(value))
            ids = np.array(blocks, "<i4").tobytes()
            rank.leaves.send(SendMedia(key=key, blocks=ids, count=rows))
        if finish:
            self.sender.scheduler.requests.append(r.FinishTransfer(key))

    def spoil(self, key: TransferKey, rank: int) -> None:
        """Fail the embedding at rank ``rank`` of the sender."""
        self.sender.group.members[rank].transfer.fail(key, BROKEN)

    def until(self, reached: Callable[[], bool], seconds: float = SECONDS) -> None:
        """Run both ends until ``reached()`` is true, asleep between iterations. Fail after ``seconds``."""
        poller = zmq.Poller()
        for engine in self.engines:
            for socket in [*engine.transfers.sockets]:
                poller.register(socket, zmq.POLLIN)
        until = time.monotonic() + seconds
        while not reached():
            assert time.monotonic() < until, [engine.scheduler.reported for engine in self.engines]
            for engine in self.engines:
                engine.turn()
            poller.poll(5)

    def reported(self, key: TransferKey, what: str) -> bool:
        """Return True if both ends received the event ``what`` for the transfer."""
        return all(what in engine.scheduler.kinds(key) for engine in self.engines)

    def land(self, *keys: TransferKey) -> None:
        self.until(lambda: all(self.reported(key, "TransferReceived") for key in keys))

    def freed(self, *keys: TransferKey) -> None:
        self.until(lambda: all(self.reported(key, "TransferFreed") for key in keys))

    def check(self, key: TransferKey, fresh: bool = True) -> None:
        """Check that every rank of the receiver has the correct rows of the image.

        With ``fresh`` blocks, also check that no other row was written.
        """
        value, _, blocks = self.images[key]
        rows = value.shape[1]
        ranks = self.receiver.group.members
        for number, rank in enumerate(ranks):
            begin, end = balanced_share(rows, number, len(ranks)) if self.shards else (0, rows)
            came = rank.rows(blocks, len(blocks) * BLOCK_ROWS)
            assert (came[:, begin:end] == value[:, begin:end]).all(), f"rows of rank {number} differ"
            others = np.delete(came, np.s_[begin:end], axis=1)
            assert not fresh or (others == -1.0).all(), "others were written"

    @property
    def sent_bytes(self) -> int:
        return sum(rank.sent_bytes for rank in self.sender.group.members)

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
