# Reads the output of `perf script -F event,period`. Prints for each event:
#
#   EVENT samples N    number of samples
#   EVENT sum N        sum of their periods
#   EVENT last N       period of the last sample
#   EVENT longest N    longest period

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
