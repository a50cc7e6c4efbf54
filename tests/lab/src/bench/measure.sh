# What the benchmark measures, on whatever it runs on: the host itself, or a guest. `percent` is how much of the time samples
# may take, as the kernel has it (0: all), and `repeat` how often everything is done. The argument is what else workloads are
# told, or `limit` for that alone. For each row it prints `row NAME` and then pairs of a name and a number.

set -u
extra=$1
kernel=/proc/sys/kernel

# What was taken as a limit before is forgotten; the kernel has no way to undo it but these.
limit() {
    echo 25 >$kernel/perf_cpu_time_max_percent
    echo 100000 >$kernel/perf_event_max_sample_rate
    echo $percent >$kernel/perf_cpu_time_max_percent
}

interrupts() {
    awk '/PMI:/ { for (i = 2; i <= NF && $i ~ /^[0-9]+$/; i++) sum += $i } END { print sum + 0 }' /proc/interrupts
}

# What perf says that it has, in files of its own.
results() {
    if [ -f data ]; then
        perf report -i data --stats 2>/dev/null |
            awk '$2 == "events:" && !seen[$1]++ { printf " %s %s", $1, $3 }'
    elif [ -f counts ]; then
        # VALUE,UNIT,EVENT,TIME,PERCENT; every interval's begins with a time.
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

# Whoever counts marks outside needs a while to begin.
[ -z "$extra" ] || sleep 3
