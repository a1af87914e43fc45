"""Translation of English text to Spanish: an encoder and an attention decoder over subwords."""
