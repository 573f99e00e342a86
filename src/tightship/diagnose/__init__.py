"""Why a plan looks as it does, why there is none, and what else would help."""
