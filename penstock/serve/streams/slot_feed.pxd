# C types of slot_feed.py, by which Cython compiles it (decision 082).

from penstock.serve.frontend.table_writer cimport SlotHandle, TableWriter
from penstock.serve.streams.actions cimport PushChunk
from penstock.serve.streams.replay_ring cimport ReplayRing


cdef class SlotFeed:
    cdef public TableWriter _writer
    cdef public long long[::1] _counts
    cdef public object _report, _drained, _lost, _no_ring, _replay, _next, _now_ns, wanted, _waiting
    cdef public bint _low_priority, _resuming
    cdef public long long _always, _flags, _replayed, _put_before, _answered, _to_drop
    cdef public long long _deaths, _reported_at_death, _budget_ns
    cdef public SlotHandle _handle
    cdef public ReplayRing _ring

    cpdef bint put(self, PushChunk chunk, long long arrival_ns, long long deadline_ns)
    cpdef bint _put(self, SlotHandle handle, PushChunk chunk, long long arrival_ns, long long deadline_ns)
    cpdef object _refill(self)
