"""Open-vocabulary speech recognition in live sound."""
