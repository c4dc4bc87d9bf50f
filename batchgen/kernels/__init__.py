"""The few operations where a step's time goes: one interface, several back ends, one function that selects."""
