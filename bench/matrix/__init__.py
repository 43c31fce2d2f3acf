"""Which loops are captured whole, with eager's numbers?"""
