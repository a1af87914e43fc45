-- HAProxy (2.6 or newer): power of two by predicted finish. Of two servers that are drawn, a request goes to the one that
-- would answer it sooner, by the load report of its last answer and the requests that were sent to it since.
-- docs/how-to/proxies.md describes the policy and what was measured; haproxy.cfg uses it.

-- A server that refused or failed, or was left for another one, counts as so far from an answer, and less as time passes: one that
-- refuses at once has nothing outstanding, and would get most of the requests.
local REFUSED_MS = 1000
-- A refusal may be due to the short deadline of one request alone, but nobody who refuses is free at once.
local BUSY_MS = 100
-- Least time of a row, whatever a report says.
local LEAST_ROW_MS = 0.01
-- Time of a row where no report has said it.
local ROW_MS = 1

-- By backend and server: the predicted finish, when it was said, the requests outstanding then, and the time of a row.
local views = {}

local function now_ms()
    local now = core.now()
    return now.sec * 1000 + now.usec / 1000
end

local function view_of(backend, server)
    local key = backend .. "/" .. server
    local view = views[key]
    if view == nil then
        view = { finish_ms = 0, said_ms = 0, outstanding = 0, row_ms = ROW_MS }
        views[key] = view
    end
    return view
end

-- Names of the servers of a backend that take new requests. Versions give numbers or booleans.
local function usable(txn, backend)
    local found = {}
    for name, server in pairs(core.backends[backend].servers) do
        local up, drains = txn.f:srv_is_up(name), server:is_draining()
        if (up == 1 or up == true) and drains ~= 1 and drains ~= true then
            found[#found + 1] = name
        end
    end
    return found
end

-- What the server said includes the requests of other proxies, and does not know those that are on their way; what this
-- proxy has sent takes at least the time of its rows.
local function finish_ms(txn, backend, server, at_ms)
    local view, outstanding = view_of(backend, server), txn.f:srv_conn(server)
    local sent = math.max(outstanding - view.outstanding, 0)
    local said_ms = view.finish_ms - (at_ms - view.said_ms) + sent * view.row_ms
    return math.max(said_ms, (outstanding + 1) * view.row_ms)
end

-- Set txn.chosen, the name of a server, where one takes requests.
local function choose(txn)
    local backend = txn.f:be_name()
    local servers = usable(txn, backend)
    if #servers == 0 then
        return
    end
    local first = math.random(#servers)
    local chosen = servers[first]
    if #servers > 1 then
        local second = servers[(first + math.random(#servers - 1) - 1) % #servers + 1]
        local at_ms = now_ms()
        if finish_ms(txn, backend, second, at_ms) < finish_ms(txn, backend, chosen, at_ms) then
            chosen = second
        end
    end
    txn:set_var("txn.chosen", chosen)
end

local function refused(txn, view, server)
    view.finish_ms, view.said_ms, view.outstanding = REFUSED_MS, now_ms(), txn.f:srv_conn(server)
end

-- A second attempt has another server than the chosen one: that refused, or did not answer.
local function observe(txn)
    local backend, server, chosen = txn.f:be_name(), txn.f:srv_name(), txn:get_var("txn.chosen")
    if server == nil then
        return
    end
    if chosen ~= nil and chosen ~= server then
        refused(txn, view_of(backend, chosen), chosen)
    end
    local view = view_of(backend, server)
    local status, report = txn.f:status(), txn.f:res_fhdr("endpoint-load-metrics")
    -- An error takes no time: it does not say when the server would answer.
    if status >= 500 and (report == nil or status ~= 503) then
        refused(txn, view, server)
        return
    end
    if report == nil then
        return
    end
    local finish = tonumber(report:match("predicted_finish_ms=([^,]+)"))
    local used = tonumber(report:match("application_utilization=([^,]+)"))
    local rows_s = tonumber(report:match("rps_fractional=([^,]+)"))
    if used and rows_s and used > 0 and rows_s > 0 then
        view.row_ms = math.max(1000 * used / rows_s, LEAST_ROW_MS)
    end
    view.finish_ms, view.said_ms = math.max(finish or REFUSED_MS, status == 503 and BUSY_MS or 0), now_ms()
    -- The request that is answered here is still counted.
    view.outstanding = txn.f:srv_conn(server) - 1
end

math.randomseed(core.now().sec + core.now().usec)
core.register_action("choose_by_finish", { "http-req" }, choose)
core.register_action("observe_finish", { "http-res" }, observe)
