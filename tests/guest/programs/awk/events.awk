# Reads `perf script -F event,period`.
#
#   EVENT samples N
#   EVENT sum N        their periods together
#   EVENT last N       the last one's
#   EVENT longest N    the longest

{
    event = $2
    sub(/:$/, "", event)
    samples[event]++
    sum[event] += $1
    last[event] = $1
    if ($1 > longest[event])
        longest[event] = $1
}
END {
    for (event in samples) {
        print event, "samples", samples[event]
        print event, "sum", sum[event]
        print event, "last", last[event]
        print event, "longest", longest[event]
    }
}
