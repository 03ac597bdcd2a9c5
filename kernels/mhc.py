"""Hyper-connections over several residual streams: gates, Sinkhorn and stream mixing: the definition.

Promises: the norm, the product with phi, the sigmoids and the Sinkhorn iterations are fp32; gates are
rounded once to the streams' dtype, and so is every mixed stream. It decides nothing about blocks of rows:
the caller cuts them.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.rms_norm import rms_norm

SINKHORN_ITERATIONS = 20
SINKHORN_EPS = 1e-12
# On the host, so few tokens at a time that torch keeps each of the many small steps on one thread: waking
# the others costs more than it saves, and far more where cores are shared. A device takes all tokens at
# once.
_SINKHORN_HOST_TOKENS = 1024


class MixingWeights(NamedTuple):
    """One half layer's fp32 norm [S*C], phi [S*C, 2*S + S*S], alphas [1], biases [S], [S] and [S, S]."""

    norm: Tensor
    phi: Tensor
    alpha_pre: Tensor
    alpha_post: Tensor
    alpha_res: Tensor
    bias_pre: Tensor
    bias_post: Tensor
    bias_res: Tensor


class Gates(NamedTuple):
    """One half layer's coefficients in the streams' dtype: pre [L, S], post [L, S], res [L, to S, from S]."""

    pre: Tensor
    post: Tensor
    res: Tensor


def mixing_logits(s_LSC: Tensor, weights: MixingWeights) -> Tensor:
    """Return fp32 [L, S + S + S*S]: the normed streams of a token times phi, before alphas and biases."""
    return rms_norm(s_LSC.flatten(1), weights.norm) @ weights.phi


def gates(s_LSC: Tensor, weights: MixingWeights) -> Gates:
    """Compute how one half layer reads the streams and writes them back.

    Args:
        s_LSC: Streams in the activations' dtype.
        weights: Of this half of this layer.
    Source: the reference, inference/model/magi2_preview.py. Differs: nothing.
    """
    num_streams, dtype = s_LSC.shape[1], s_LSC.dtype
    scaled = mixing_logits(s_LSC, weights) * (1 / math.sqrt(s_LSC.shape[1] * s_LSC.shape[2]))
    z_pre, z_post, z_res = torch.split(scaled, [num_streams, num_streams, num_streams * num_streams], dim=1)
    pre = torch.sigmoid(weights.alpha_pre * z_pre + weights.bias_pre)
    post = 2 * torch.sigmoid(weights.alpha_post * z_post + weights.bias_post)
    z_LSS = z_res.reshape(-1, num_streams, num_streams)
    res = sinkhorn(weights.alpha_res * z_LSS + weights.bias_res)
    return Gates(pre.to(dtype), post.to(dtype), res.to(dtype))


def sinkhorn(logits_LSS: Tensor) -> Tensor:
    """Make each matrix of exp(logits) nearly doubly stochastic: columns first, rows last.

    Args:
        logits_LSS: fp32 [L, to S, from S].

    Returns:
        fp32, rows (over the last dim) summing to one.
    """
    if logits_LSS.device.type != "cpu":
        return _balance(logits_LSS)
    return torch.cat([_balance(chunk) for chunk in torch.split(logits_LSS, _SINKHORN_HOST_TOKENS)])


def pre_mix(s_LSC: Tensor, pre_LS: Tensor) -> Tensor:
    """Sum the streams of each token, weighted, in fp32; return [L, C] in the streams' dtype."""
    weight = pre_LS.float()
    mixed = weight[:, 0, None] * s_LSC[:, 0].float()
    for j in range(1, s_LSC.shape[1]):
        mixed.addcmul_(weight[:, j, None], s_LSC[:, j].float())
    return mixed.to(s_LSC.dtype)


def post_mix(s_LSC: Tensor, gate: Gates, out_LC: Tensor) -> Tensor:
    """Mix the streams among each other and add the half layer's output, in fp32, rounded once.

    The order of the sum is fixed: source streams ascending, then the output.
    """
    residual, post = gate.res.float(), gate.post.float()
    mixed = residual[:, :, 0, None] * s_LSC[:, 0, None].float()
    for j in range(1, s_LSC.shape[1]):
        mixed.addcmul_(residual[:, :, j, None], s_LSC[:, j, None].float())
    mixed.addcmul_(post[:, :, None], out_LC[:, None].float())
    return mixed.to(s_LSC.dtype)


def _balance(logits_LSS: Tensor) -> Tensor:
    # Tokens last: sums over a dim of four are slow when that dim is innermost.
    m_SSL = logits_LSS.permute(1, 2, 0).contiguous()
    m_SSL = torch.exp(m_SSL - m_SSL.amax(dim=(0, 1)))
    for _ in range(SINKHORN_ITERATIONS):
        m_SSL = m_SSL / (m_SSL.sum(dim=0, keepdim=True) + SINKHORN_EPS)
        m_SSL = m_SSL / (m_SSL.sum(dim=1, keepdim=True) + SINKHORN_EPS)
    return m_SSL.permute(2, 0, 1)
