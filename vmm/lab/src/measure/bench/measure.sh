# Runs the benchmark's rows on the system where it is started: the host itself, or a guest. `percent` is the kernel's
# limit for the time that samples take (0: no limit), and `repeat` is the number of runs of each row. The argument is
# one more argument of the workloads; the argument `limit` only sets the limit. Each run prints `row NAME` and pairs of
# a name and a number.

set -u
extra=$1
kernel=/proc/sys/kernel

# Sets the limit. The kernel may have lowered the sampling rate by itself, which only these writes undo.
limit() {
    echo 25 >$kernel/perf_cpu_time_max_percent
    echo 100000 >$kernel/perf_event_max_sample_rate
    echo $percent >$kernel/perf_cpu_time_max_percent
}

interrupts() {
    awk '/PMI:/ { for (i = 2; i <= NF && $i ~ /^[0-9]+$/; i++) sum += $i } END { print sum + 0 }' /proc/interrupts
}

# Prints the numbers that perf has written to its own files.
results() {
    if [ -f data ]; then
        perf report -i data --stats 2>/dev/null |
            awk '$2 == "events:" && !seen[$1]++ { printf " %s %s", $1, $3 }'
    elif [ -f counts ]; then
        # VALUE,UNIT,EVENT,TIME,PERCENT; the lines of intervals begin with a time.
        awk -F, '/^ *[0-9]+\.[0-9]/ { if ($1 != time) intervals++; time = $1; next }
            /^[0-9]/ { if (!events++) count = $1; running += $5 }
            END { printf " count %.0f running %.0f intervals %d", count, running, intervals }' counts
    fi
}

# measure ROW WORKLOAD PERF...
measure() {
    row=$1 workload=$2
    shift 2
    for turn in $(seq $repeat); do
        rm -f data counts
        limit
        before=$(interrupts)
        if ! ./bench-workload run "$@" ./bench-workload $workload $extra >said 2>errors; then
            echo "$row: $(cat said errors)" >&2
            exit 1
        fi
        echo "row $row $(echo $(cat said)) interrupts $(($(interrupts) - before))$(results)"
    done
}

if [ "$extra" = limit ]; then
    limit
    exit
fi

# With marks, the host counts from mark to mark, and takes a while to start counting.
[ -z "$extra" ] || sleep 3
