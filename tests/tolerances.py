"""Every tolerance of the tests, and why it is what it is."""

# Time rows: fp32 cosine and sine of angles up to 1000; another libm differs in the last bit.
TIME_ROWS = {"rtol": 0.0, "atol": 1e-6}
# The same rows, stored as decimal numbers at true sizes.
TIME_ROWS_FULL = {"rtol": 0.0, "atol": 1e-5}

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
