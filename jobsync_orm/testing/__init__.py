"""For the tests of applications that use the library."""
