"""Do whole trainings overlay eager's?"""
