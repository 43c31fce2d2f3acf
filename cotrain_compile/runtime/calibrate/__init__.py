"""Calibrate: the rates of this computer, measured."""
