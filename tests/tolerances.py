"""Every tolerance of the tests, and why it is what it is."""

# Time rows: fp32 cosine and sine of angles up to 1000; another libm differs in the last bit.
TIME_ROWS = {"rtol": 0.0, "atol": 1e-6}
# The same rows, stored as decimal numbers at true sizes.
TIME_ROWS_FULL = {"rtol": 0.0, "atol": 1e-5}

# The transformer, all fp32, against the reference's stored numbers: reordered sums differ by 4e-6.
DIT_FP32 = {"rtol": 1e-4, "atol": 2e-5}
# Stream gates before alphas and biases: values up to 100, sums of 512 terms; measured 3e-5.
DIT_FP32_GATES = {"rtol": 0.0, "atol": 2e-4}
# The last state of the streams: values up to 21; measured 4e-5.
DIT_FP32_STREAMS = {"rtol": 1e-4, "atol": 1e-4}
# fp32 attention against a float64 softmax over the same bf16 inputs.
DIT_ATTENTION_F64 = {"rtol": 0.0, "atol": 1e-5}
# One bf16 module from stored inputs, as relative L2 norms: other correct rounding orders differ by 0.5 %.
DIT_BF16_MODULE = 1e-2
DIT_BF16_TOKEN = 3e-2
# Router weights in bf16: the logits' inputs are rounded.
DIT_BF16_PROBS = {"rtol": 0.0, "atol": 1e-2}
# A whole bf16 forward: harmless roundings flip up to 14 expert choices of a tiny model, so only the bulk is
# close.
DIT_BF16_MEDIAN_TOKEN = 4e-2
DIT_BF16_CLOSE_TOKEN = 0.1
DIT_BF16_CLOSE_SHARE = 0.8
DIT_BF16_FORWARD = 0.25

# Text features in fp32: another library version or thread count sums in another order.
TEXT_FEATURES_FP32 = {"rtol": 0.0, "atol": 1e-4}
# The same in bf16, norm of the difference over the norm: rewritten fallback kernels moved 1.3e-2.
TEXT_FEATURES_BF16_RELATIVE = 5e-2
# Solver states for recorded velocities: fp32 coefficients, a 2 x 2 system solved in closed form.
SOLVER_STATES = {"rtol": 0.0, "atol": 2e-6}
# One multiplication and two additions in fp32.
GUIDANCE = {"rtol": 0.0, "atol": 1e-6}
# The whole loop: 20 steps amplify the last bit of a stand-in model by the guidance scale.
LOOP_STATES = {"rtol": 0.0, "atol": 1e-4}
# Normal draws of the CPU generator: the vectorised and the scalar path round differently.
NOISE = {"rtol": 0.0, "atol": 1e-6}
# A velocity that always points away from one clean latent: rounding of up to 200 fp32 steps.
SOLVER_FIXED_POINT = {"rtol": 0.0, "atol": 1e-5}
# Resized frames are truncated to bytes: a last bit of the interpolation may move a value by one, rarely.
RESIZED_FRAMES = 1
RESIZED_FRAMES_EQUAL = 0.99

# The image encoder: bit-equal but for the order of sums on another machine.
WAN22_ENCODE = {"rtol": 0.0, "atol": 2e-5}
# The video decoder in fp32; its own fp32 error against float64 is 5e-6.
TURBO_FP32 = {"rtol": 0.0, "atol": 2e-5}
# bf16 weights and activations against fp32 ones: kernels round differently from machine to machine.
TURBO_BF16_MEAN = 1e-2
TURBO_BF16_MAX = 2e-1
# The audio decoder: its fp32 error against float64 is 5e-5, amplified by the Snake units' exponents.
OOBLECK = {"rtol": 0.0, "atol": 3e-4}
# Fourier resampling: two FFT libraries were within 2e-6.
RESAMPLE = {"rtol": 0.0, "atol": 5e-6}
# A bf16 forward of a few layers without a mixture against fp32: roundings add up, no choice can flip.
DIT_BF16_DENSE_FORWARD = 5e-2

# Over ranks in fp32: products of fewer rows, and sums in another order; as the parallel specification states.
SEQUENCE_PARALLEL = 1e-5
TENSOR_PARALLEL = 2e-5
# Two guided steps. Guidance enlarges the rounding of a prediction (1.7e-6) up to 13 times; the second step
# starts from that: branches computed apart on one rank differ by 4.5e-5, and so do latents whose last bit was
# moved (5e-5), without any group. Measured over ranks: 6.1e-5.
GUIDED_STEPS = 2e-4
# A whole fp32 render over ranks against one rank: rounding moves a byte of a frame by one, here and there.
RENDER_PSNR_DB = 50.0
