# C types of response_date.py, by which Cython compiles it (decision 082).

cdef class ResponseDate:
    cdef public bytes line
    cdef object _clock_s
