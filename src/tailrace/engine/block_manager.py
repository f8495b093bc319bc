"""Owns the KV blocks: who holds which, what can be reused, what goes first when space runs out.

Rules:
1. A block is free, held by one or more sequences, or idle in the prefix cache; never two of these.
2. Only full blocks whose tokens are known and computed enter the prefix cache. A block's key is a
   hash over the salt and every token up to the block's end, so equal keys mean equal KV.
3. A hit never covers a whole prompt: its last token must be computed to have logits.
4. Free blocks are taken first, then the cached block that has been idle longest. A sequence gives
   its blocks back tail first, so a shared prefix outlives the tails that grew from it.
5. A second block with the same content stays unregistered; tables are never rewritten.

    state        leaves by      to
    free         grow           held, unregistered
    held         commit         held, registered: once full, unless another block has its content
    held         open (a hit)   held by one more sequence; only a registered block can be hit
    held         close          held by one fewer; by none: idle if registered, else free
    idle         open (a hit)   held, registered
    idle         grow           held, unregistered: evicted and reused
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

from tailrace.errors import EngineError, IntegrityError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# 256 bits: a collision, which would show one client another's text, cannot even be searched for.
_DIGEST_BYTES = 32


@dataclass
class _Table:
    blocks: list[int]
    registered: int
    """Leading blocks whose key has been computed."""
    key: bytes
    """Key of the last of those; of the salt alone where there is none."""


class BlockManager:
    """Hands out fixed-size KV blocks and remembers prefixes.

    Args:
        num_blocks: Blocks of the pool; ids are 0 to `num_blocks` - 1.
        block_size: Tokens of a block.
        prefix_cache: Whether full blocks can be found by, and shared with, later sequences.

    Raises:
        EngineError: A pool without blocks, or blocks without room.
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_cache: bool = True) -> None:
        if num_blocks < 1 or block_size < 1:
            raise EngineError(f"a pool of {num_blocks} blocks of {block_size}: both must be >= 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.hit_tokens_total = 0
        self.query_tokens_total = 0
        self.evictions_total = 0
        self._prefix_cache = prefix_cache
        self._free = list(range(num_blocks - 1, -1, -1))
        self._holders = [0] * num_blocks
        self._keys: dict[int, bytes] = {}
        self._cached: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._tables: dict[str, _Table] = {}

    @property
    def free_blocks(self) -> int:
        """Blocks that could be handed out now, idle cached ones included."""
        return len(self._free) + len(self._idle)

    @property
    def held_blocks(self) -> int:
        """Blocks that sequences hold, each counted once."""
        return self.num_blocks - self.free_blocks

    def lookup(self, token_ids: Sequence[int], salt: str) -> int:
        """Return how many tokens `open` would find cached; takes nothing."""
        return sum(self.block_size for _ in self._cached_prefix(token_ids, salt))

    def open(self, seq_id: str, token_ids: Sequence[int], salt: str) -> int:
        """Start a sequence's table with its cached prefix; return that prefix's tokens.

        Raises:
            EngineError: The sequence has a table already.
        """
        if seq_id in self._tables:
            raise EngineError(f"sequence {seq_id} holds blocks already")
        table = _Table([], 0, _salt_key(salt))
        for block, key in self._cached_prefix(token_ids, salt):
            self._idle.pop(block, None)
            self._holders[block] += 1
            table.blocks.append(block)
            table.key = key
        table.registered = len(table.blocks)
        self._tables[seq_id] = table
        cached = table.registered * self.block_size
        self.query_tokens_total += len(token_ids)
        self.hit_tokens_total += cached
        return cached

    def can_grow(self, seq_id: str, num_tokens: int) -> bool:
        """Whether the sequence's table could be made to cover so many tokens.

        Raises:
            EngineError: The sequence has no table.
        """
        return self._missing(seq_id, num_tokens) <= self.free_blocks

    def grow(self, seq_id: str, num_tokens: int) -> None:
        """Make the sequence's table cover so many tokens.

        Raises:
            EngineError: There are not enough blocks, or no such table; nothing was taken.
        """
        missing = self._missing(seq_id, num_tokens)
        if missing > self.free_blocks:
            raise EngineError(
                f"sequence {seq_id} needs {missing} more blocks, {self.free_blocks} are free"
            )
        blocks = self._tables[seq_id].blocks
        for _ in range(missing):
            blocks.append(self._take())

    def table(self, seq_id: str) -> list[int]:
        """Return the sequence's block ids: the live list, not to be changed.

        Raises:
            EngineError: The sequence has no table.
        """
        return self._table(seq_id).blocks

    def commit(self, seq_id: str, token_ids: Sequence[int], num_computed: int) -> None:
        """Note that the KV of the first `num_computed` tokens is written.

        Looks only at blocks that became full since the last call.

        Args:
            seq_id: Whose KV.
            token_ids: All of the sequence's tokens, from the first.
            num_computed: Never less than at the last call.

        Raises:
            EngineError: The sequence has no table, or more is computed than tokens are known or
                blocks held.
        """
        table = self._table(seq_id)
        size = self.block_size
        known = min(len(token_ids), len(table.blocks) * size)
        if num_computed > known:
            raise EngineError(
                f"sequence {seq_id}: {num_computed} tokens computed, but {len(token_ids)} known "
                f"and blocks for {len(table.blocks) * size} held"
            )
        if not self._prefix_cache:
            return
        while (table.registered + 1) * size <= num_computed:
            start = table.registered * size
            table.key = _next_key(table.key, token_ids[start : start + size])
            self._register(table.blocks[table.registered], table.key)
            table.registered += 1

    def close(self, seq_id: str, *, forget: bool = False) -> None:
        """Give back what a sequence holds.

        Args:
            seq_id: Whose blocks.
            forget: Whether their content is not to be trusted: no later sequence finds it.

        Raises:
            EngineError: The sequence has no table.
        """
        blocks = self._table(seq_id).blocks
        del self._tables[seq_id]
        if forget:
            for block in blocks:
                self._unregister(block)
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._let_go(block)

    def check_integrity(self) -> None:
        """Verify every rule that the structures can break.

        Raises:
            IntegrityError: A block is in two states or none, a count or a key is wrong.
        """
        held = Counter(block for table in self._tables.values() for block in table.blocks)
        places = Counter([*self._free, *self._idle, *held])
        for block in range(self.num_blocks):
            if places.pop(block, 0) != 1:
                raise IntegrityError(f"block {block} is not in exactly one of free, idle and held")
            if self._holders[block] != held[block]:
                raise IntegrityError(
                    f"block {block}: {self._holders[block]} holders noted, {held[block]} found"
                )
        if places:
            raise IntegrityError(f"blocks {sorted(places)} are none of the pool's")
        if self._cached != {key: block for block, key in self._keys.items()}:
            raise IntegrityError("keys and cached blocks disagree")
        if self._keys.keys() & set(self._free) or self._idle.keys() - self._keys.keys():
            raise IntegrityError("a free block is registered, or an idle one is not")

    def _table(self, seq_id: str) -> _Table:
        table = self._tables.get(seq_id)
        if table is None:
            raise EngineError(f"sequence {seq_id} holds no blocks")
        return table

    def _missing(self, seq_id: str, num_tokens: int) -> int:
        have = len(self._table(seq_id).blocks)
        return max(0, -(-num_tokens // self.block_size) - have)

    def _cached_prefix(self, token_ids: Sequence[int], salt: str) -> Iterator[tuple[int, bytes]]:
        """Yield (block, key) of the longest cached prefix that leaves at least one token."""
        if not self._cached:
            return
        key = _salt_key(salt)
        size = self.block_size
        for start in range(0, (len(token_ids) - 1) // size * size, size):
            key = _next_key(key, token_ids[start : start + size])
            block = self._cached.get(key)
            if block is None:
                return
            yield block, key

    def _register(self, block: int, key: bytes) -> None:
        if key not in self._cached:
            self._cached[key] = block
            self._keys[block] = key

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            del self._cached[self._keys.pop(block)]
            self.evictions_total += 1
        self._holders[block] = 1
        return block

    def _unregister(self, block: int) -> None:
        key = self._keys.pop(block, None)
        if key is not None:
            del self._cached[key]

    def _let_go(self, block: int) -> None:
        if block in self._keys:
            self._idle[block] = None
        else:
            self._free.append(block)


def _salt_key(salt: str) -> bytes:
    return blake2b(salt.encode(), digest_size=_DIGEST_BYTES).digest()


def _next_key(key: bytes, token_ids: Sequence[int]) -> bytes:
    packed = struct.pack(f"<{len(token_ids)}I", *token_ids)
    return blake2b(key + packed, digest_size=_DIGEST_BYTES).digest()
