"""What the device keeps between steps, and what each step reads of it."""

import torch

from engine.state import SamplingState
from kernels.step_state import DecodeInputs, SlotRows


class DeviceState:
    """
    The rows of all slots, and the network's inputs, whose addresses graphs know.

    Args:
        sampling: Of max_num_seqs + 1 slots: the last is that of padding rows.
        max_blocks: Columns of the block tables.
        max_rows: Most tokens of a step.
    """

    def __init__(self, sampling: SamplingState, *, max_blocks: int, max_rows: int) -> None:
        device, num_slots = sampling.device, sampling.max_num_seqs
        self.padding_slot = num_slots - 1
        self.rows = SlotRows(
            num_computed=torch.zeros(num_slots, dtype=torch.int32, device=device),
            last_token=sampling.last_token,
            block_tables=torch.zeros(num_slots, max_blocks, dtype=torch.int32, device=device),
            positions=sampling.positions,
            streams=sampling.streams,
            top_k=sampling.top_k,
            knobs=sampling.knobs,
        )
        max_rows = max(max_rows, num_slots)
        ids, positions, slot_mapping = (torch.zeros(max_rows, dtype=torch.int64, device=device) for _ in range(3))
        seq_lens = torch.ones(max_rows, dtype=torch.int32, device=device)
        self.inputs = DecodeInputs(ids, positions, slot_mapping, seq_lens)
