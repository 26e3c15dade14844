"""From two base models and a calibration set to maps: record, capture, solve, choose a scale."""
