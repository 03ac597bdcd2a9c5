"""The networks between pixels or samples and latents: image encoder, video decoder, audio decoder."""
