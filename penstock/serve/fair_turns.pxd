# C types of fair_turns.py, by which Cython compiles it (decision 082).

cdef class Usage:
    cdef public FairTurns turns
    cdef public long long weight, used_ns, window
    cdef public bint heavy, long, young, unusual, stays
    cdef public long long _until_charged, _windows, _counted

    cpdef object begin_window(self, long long window)
    cpdef long long begin(self)
    cpdef object end(self, long long begin_cpu_ns, long long most_ns=*)


cdef class _LongTurns:
    cdef public double least_share
    cdef public long long paid_ns
    cdef public object waiting
    cdef public double owed_ns


cdef class FairTurns:
    cdef public object clock_ns, cpu_ns, loop
    cdef public long long threads
    cdef public Usage newcomers, _all_new
    cdef public double usual_ns, usual_job_ns
    cdef public object _light, _heavy
    cdef public _LongTurns _long, _new
    cdef public bint _scheduled, _timed
    cdef public long long _used_ns, _window, _active, _average_ns, _limit_ns, _connecting_left_ns, _ended_ns
    cdef public double _owed_ns, _load
    cdef public long long _load_at_ns, _load_cpu_ns, _heavy_ns
