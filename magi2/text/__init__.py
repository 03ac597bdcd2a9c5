"""From a prompt to features: the encoded text, the tokenizer, the text tower and the negative prompt."""
