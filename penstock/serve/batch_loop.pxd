# C types of batch_loop.py, by which Cython compiles it (decision 082).

from penstock.serve.fair_turns cimport FairTurns


cdef class BatchLoop:
    cdef public object work, call_soon, clock_ns, cpu_ns
    cdef public long long max_read_ns
    cdef public FairTurns turns
    cdef public bint _scheduled, _running
    cdef public object _poll_ns, _previous_poll_ns
    cdef public long long _reading_ns
    cdef public double _read_ns, _run_ns
    cdef public object _hold_ns, _call_later
    cdef public long long _held_cpu_ns
    cdef public object _gathers
    cdef public long long _read_limit_ns, _sample_ns, _sampled_at_ns, _sample_left

    cpdef object wake(self)
    cpdef bint run_if_overdue(self, long long now_ns)
    cpdef long long arrival_ns(self, long long now_ns)
    cpdef long long sampled_arrival_ns(self, long long now_ns, object age)
    cpdef object _run_batches(self)
