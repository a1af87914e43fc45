# C types of costs.py, by which Cython compiles it (decision 082).

import cython


cdef class Costs:
    cdef public list rows, _ns
    cdef public double handling_ns
    cdef public object _full_ns, _table
    cdef public long long min_compute_ns

    cpdef long long of(self, long long rows)
    cpdef long long finish_ns(self, long long waiting)
    @cython.locals(right=cython.Py_ssize_t, left=cython.Py_ssize_t, share=cython.double, predicted_ns=cython.double,
                   step=cython.double)
    cpdef object observe(self, long long rows, double ns)
    @cython.locals(count=cython.Py_ssize_t, at=cython.Py_ssize_t)
    cpdef bint read(self, long long[::1] rows, long long[::1] ns, double handling_ns, long long min_compute_ns)
    @cython.locals(right=cython.Py_ssize_t, share=cython.double)
    cpdef double _network_ns(self, long long rows)
