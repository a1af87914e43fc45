# C types of table_writer.py, by which Cython compiles it (decision 082).

import cython

from penstock.serve.frontend.finish_prediction cimport FinishPrediction
from penstock.serve.frontend.rejections cimport Rejections


cdef class SlotHandle:
    cdef public TableWriter writer
    cdef public long long slot
    cdef public object done
    cdef public bint ended, low_priority
    cdef public long long length, history


cdef class TableWriter:
    cdef public object table, _wake, _input_bytes, _output, _state, _restored, groups, _grid
    cdef public object _left, _at_end
    cdef public list _free, _released, _handles, _views
    cdef public bint _may_fill, _only_frontend
    cdef public long long _budget_ns, _chunks, _results, _index, _first, _each, _input_nbytes, _state_bytes, _read
    cdef public long long _whole_chunk, shortest_length, _numbers
    cdef public object shortest_lengths
    # A compiler may change the order of loads and stores of C numbers, but not across the calls that read and write
    # these: they publish chunks and results, and tell what was published.
    cdef public object _submitted, _busy, _done_count
    cdef public long long[::1] _taken, _consumed, _produced, _generation, _length, _flags
    cdef public long long[::1] _deadline_ns, _arrival_ns, _status, _output_length, _queue_ns, _compute_ns
    cdef public long long[::1] _done, _saved, _held, counts, _held_lengths
    cdef public Rejections _rejections
    cdef public FinishPrediction _prediction

    cpdef object try_submit(self, object chunk, object done, long long arrival_ns, long long now_ns,
                            long long budget_ns, bint low_priority)
    cpdef object reject(self, long long now_ns, long long left_ns)
    cpdef object cached_rejection(self, long long now_ns, long long left_ns=*)
    @cython.locals(slot=cython.longlong)
    cpdef bint push(self, SlotHandle handle, object chunk, long long deadline_ns, long long arrival_ns,
                    long long flags=*, long long length=*)
    cpdef long long room(self, SlotHandle handle)
    cpdef object cancel(self, SlotHandle handle)
    cpdef long long _rows_ahead(self, bint low_priority)
    cpdef object _count_rejection(self)
    @cython.locals(first=cython.longlong, until=cython.longlong, index=cython.longlong, slot=cython.longlong,
                   taken=cython.longlong, capacity=cython.longlong, handle=SlotHandle)
    cpdef long long _hand_out(self)
    cpdef long long collect(self)
    @cython.locals(slot=cython.longlong, taken=cython.longlong, handle=SlotHandle)
    cpdef object _hand_one(self, long long slot)
    @cython.locals(submitted=cython.longlong, entry=cython.longlong, begin=cython.longlong)
    cpdef object _put(self, long long slot, object chunk, long long deadline_ns, long long arrival_ns,
                      long long flags, long long length)
    @cython.locals(slot=cython.longlong, entry=cython.longlong, last=bint)
    cpdef object _take(self, SlotHandle handle, long long taken)
    @cython.locals(length=cython.longlong)
    cpdef object _output_of(self, long long entry)
    cpdef bint _is_last(self, SlotHandle handle, long long taken)
    cpdef object _release(self, SlotHandle handle)
    cpdef object _settle(self, long long listed)
