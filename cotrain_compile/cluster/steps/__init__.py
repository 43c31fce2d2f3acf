"""Steps: a step of stages on ranks as data, what it takes, and what of it rests on hosts."""
