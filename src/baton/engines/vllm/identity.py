"""Who a vLLM server is to its peers: the same in each of its processes, another at each start."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.ids import Epoch, WorkerId

if TYPE_CHECKING:
    from baton.engines.vllm.options import Role

EPOCH_CHARS = 32


@dataclass(frozen=True, slots=True)
class Identity:
    """One life of one vLLM server, of `num_ranks` tensor-parallel ranks."""

    worker: WorkerId
    epoch: Epoch
    role: Role
    num_ranks: int

    @property
    def sends(self) -> bool:
        """Whether it prefills for others."""
        return self.role != "decode"

    @property
    def receives(self) -> bool:
        """Whether it decodes what others prefilled."""
        return self.role != "prefill"

    def of_rank(self, rank: int) -> tuple[WorkerId, Epoch]:
        """How one rank introduces itself."""
        return rank_name(self.worker, rank, self.num_ranks), rank_epoch(
            self.epoch, rank, self.num_ranks
        )


def compute_epoch(engine_id: str, instance_id: str) -> Epoch:
    """The epoch of one start. `instance_id` differs at each; `engine_id` may be the user's."""
    return Epoch(_hex_of(f"baton/epoch/1|{engine_id}|{instance_id}"))


def default_name(epoch: Epoch) -> WorkerId:
    """The name of a server that was given none."""
    return WorkerId(f"vllm-{epoch[:8]}")


def rank_name(worker: WorkerId, rank: int, num_ranks: int) -> WorkerId:
    """One rank's name; that of a server of one rank is the server's own."""
    return worker if num_ranks == 1 else WorkerId(f"{worker}/{rank}")


def rank_epoch(epoch: Epoch, rank: int, num_ranks: int) -> Epoch:
    """One rank's epoch; that of a server of one rank is the server's own."""
    return epoch if num_ranks == 1 else Epoch(_hex_of(f"baton/rank-epoch/1|{epoch}|{rank}"))


def _hex_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:EPOCH_CHARS]
