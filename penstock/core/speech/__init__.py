"""Speech: sound as samples, spoken words, language models, and the second decoding of an utterance."""
