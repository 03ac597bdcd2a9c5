"""Classifier-free guidance in its plain form; the reference's other knobs are off in the released model."""

from torch import Tensor


def guide(prediction: Tensor, scale: float) -> Tensor:
    """Move from the unconditional prediction through the conditional one, by `scale`.

    Args:
        prediction: [2, ...]; row 0 conditional, row 1 unconditional.
        scale: 1 gives the conditional prediction.

    Returns:
        fp32 [1, ...].
    Source: the reference, inference/pipeline/sampler.py. Differs: plain guidance only.
    """
    conditional, unconditional = prediction[:1].float(), prediction[1:].float()
    return unconditional + scale * (conditional - unconditional)
