"""KV blocks in a file, and the copies from the memory above and to the cache on the device."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from shutil import disk_usage
from typing import BinaryIO, Protocol

import torch
from torch import Tensor

from schedlab.gpu_backend.host_blocks import PIECE_BLOCKS, HostBlocks, Int64
from schedlab.sim.errors import SchedlabError, SpecError


class Blocks(Protocol):
    """Memory of a tier that one below it copies from."""

    def block(self, place: int) -> memoryview:
        """Return the bytes of a block; of use until the next is asked for."""


def open_block_file(num_bytes: int, folder: Path | None, key: str) -> BinaryIO:
    """Return a file of that size, which has no name and is gone when it is closed, whoever does it.

    Parameters
    ----------
    num_bytes : int
        Its size. The room is taken at once.
    folder : Path or None
        Where it lies; the system's temporary directory if None.
    key : str
        The tier's in a specification, for errors.

    Raises
    ------
    SpecError
        If there is no such folder, nothing can be written there, or there is not enough room.
    """
    where = Path(tempfile.gettempdir()) if folder is None else folder
    if not where.is_dir():
        raise SpecError(f"{key}.path: there is no folder {where}; make it, or name another")
    try:
        free = disk_usage(where).free
        file = tempfile.TemporaryFile(dir=where, buffering=0)  # noqa: SIM115 - it is returned
    except OSError as error:
        raise SpecError(
            f"{key}.path: no file can be made in {where} ({error.strerror}); name another folder"
        ) from None
    try:
        if num_bytes > free:
            raise OSError
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, num_bytes)
        else:  # macOS takes room when something is written
            file.truncate(num_bytes)
    except OSError:
        file.close()
        raise SpecError(
            f"{key}: {num_bytes / 2**30:.2f} GiB are to lie in {where}, where "
            f"{free / 2**30:.2f} GiB are free; lower its gib or num_blocks, or name a folder on "
            "another disk (path)"
        ) from None
    return file


class FileBlocks:
    """Blocks in a file, each with the keys and values of all layers of one KV block.

    Parameters
    ----------
    kv_pools : list of (Tensor, Tensor)
        The cache on the device; keys and values of each layer.
    file : BinaryIO
        Large enough for its blocks; unbuffered.
    num_blocks : int
        How many.
    what : str
        What an error calls them.

    Attributes
    ----------
    num_blocks : int
        How many there are.

    Notes
    -----
    What is read or written goes through the system's cache of files: a copy is done when the
    system says so, and not only when the disk has it. On its way to or from the device a block
    lies in host memory (page-locked if the device is a GPU), of which each direction has a piece.
    """

    def __init__(
        self, kv_pools: list[tuple[Tensor, Tensor]], file: BinaryIO, num_blocks: int, what: str
    ) -> None:
        self._file = file
        self.num_blocks = num_blocks
        self._what = what
        self._back = HostBlocks(kv_pools, PIECE_BLOCKS)
        self._back.what = what
        self._back.allocate()
        self._block_bytes = len(self._back.block(0))
        self._below = bytearray(self._block_bytes)

    def copy_down(self, above: Blocks, source: Sequence[int], places: Sequence[int]) -> None:
        """Copy blocks of the memory above here.

        Raises
        ------
        SchedlabError
            If the system does not write.
        """
        for place, to in zip(source, places, strict=True):
            self._whole(os.pwrite, "written", to, above.block(place))

    def copy_in(self, places: Sequence[int], blocks: Int64) -> None:
        """Copy blocks to those of the cache.

        Raises
        ------
        SchedlabError
            If the system does not read.
        """
        for first in range(0, len(places), PIECE_BLOCKS):
            piece = places[first : first + PIECE_BLOCKS]
            for i, place in enumerate(piece):
                self._read(place, self._back.block(i))
            self._back.copy_in(range(len(piece)), blocks[first : first + PIECE_BLOCKS])
            if self._back.on_gpu:
                torch.cuda.current_stream().synchronize()  # the next piece lies where this one does

    def block(self, place: int) -> memoryview:
        """Return the bytes of a block, for the tier below; see `Blocks.block`."""
        view = memoryview(self._below)
        self._read(place, view)
        return view

    def _read(self, place: int, into: memoryview) -> None:
        self._whole(lambda file, data, at: os.preadv(file, [data], at), "read", place, into)

    def _whole(
        self, do: Callable[[int, memoryview, int], int], done: str, place: int, data: memoryview
    ) -> None:
        """Read or write all of a block, which the system may do in parts."""
        begin, size, why = place * self._block_bytes, self._block_bytes, "the file is too short"
        at = 0
        while at < size:
            try:
                count = do(self._file.fileno(), data[at:], begin + at)
            except OSError as error:
                count, why = 0, error.strerror or str(error)
            if not count:
                raise SchedlabError(f"{self._what}: block {place} cannot be {done}: {why}")
            at += count
