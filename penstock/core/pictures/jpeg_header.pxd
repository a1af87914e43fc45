# C types of jpeg_header.py, by which Cython compiles it (decision 082).

cimport cython

@cython.locals(at=cython.Py_ssize_t, size=cython.Py_ssize_t, end=cython.Py_ssize_t, marker=cython.int,
               length=cython.Py_ssize_t, channels=cython.int)
cpdef object plain_jpeg(object body)
@cython.locals(at=cython.Py_ssize_t)
cdef bint _has_whole_tables(object body, Py_ssize_t begin, Py_ssize_t end) except -1
