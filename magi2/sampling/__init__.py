"""From noise to latents: the noise draw, the FlowUniPC solver, plain guidance and the denoising loop."""
