"""What a family is like beyond one number: growth with length, long context, logic, obedience."""
