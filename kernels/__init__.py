"""Pure tensor operations of MAGI-2: one operation per file, defined by its torch reference.

Promises: no process groups, no configuration, no environment, no modules with weights. What runs for a
device and a setting is decided by `kernels.dispatch` alone.

Shape letters used as suffixes of tensor names in `kernels`, `magi2.model`, `magi2.parallel` and
`magi2.vae`: B batch, L packed tokens, C model width, S mHC streams, H attention heads, D head width, M
modalities, G MoE heads, E experts per MoE head, K chosen experts, F expert width, Z latent channels, T time
steps, Y rows, X columns, A audio latent steps, W waveform samples, P ranks. Where a shard and the whole
meet: `local_q_LHD`, `full_q_LHD`.
"""

# Not the distribution's version: transformers probes a package of this name and must find one too old to
# use (ADR-0004).
__version__ = "0.0"
