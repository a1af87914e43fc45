# C types of refusals.py, by which Cython compiles it (decision 082).

cdef class Refusals:
    cdef public long long budget_ns
    cdef public object call_soon, clock_ns
    cdef public double share
    cdef public object answer_cost
    cdef public long long _compared_ns
    cdef public object _held
    cdef public double _cost_ns, _saved_ns
    cdef public long long _saved_at_ns
    cdef public bint _scheduled
    cdef public long long _ended_ns

    cpdef object observe(self, long long spent_ns)
    cpdef bint admit(self, long long now_ns)
    cpdef object hold(self, object connection, object refusal, long long now_ns)
    cpdef object count(self)
    cpdef bint _charge(self, long long now_ns)
