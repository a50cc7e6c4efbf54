# Reads the output of `perf script -D` for samples with the counter's value (PERF_SAMPLE_READ), and compares the period
# of each sample with the difference of two values. Some of the kernel's PMU drivers write the period that ends with a
# sample into it, others the period that begins there. The kernel searches for the right period from 1 on, and it raises
# and rounds the first ones, so the comparison begins with the first period of at least 1000. Prints:
#
#   compared N    number of compared intervals between two samples
#   ended N       number of those whose length is the period in the sample at their end
#   begun N       number of those whose length is the period in the sample at their beginning
#   shortened N   number of those that are shorter than the period in the sample at their beginning. The kernel ends a
#                 period at a tick if more than eight times the period is left of it that it wants by then, as after it
#                 throttled the event.
#   value N       counter's value at the last sample
#   longest N     longest period

/PERF_RECORD_SAMPLE/ {
    for (field = 1; field < NF; field++)
        if ($field == "period:") next_period = $(field + 1)
}
/\.\.\. id .* value/ {
    next_value = ("0x" substr($5, 1, 16)) + 0
    if (period >= 1000 || compared) {
        compared++
        ended += next_value == value + next_period
        begun += next_value == value + period
        shortened += next_value < value + period
    }
    value = next_value
    period = next_period
    if (period > longest)
        longest = period
}
END {
    print "compared", compared + 0
    print "ended", ended + 0
    print "begun", begun + 0
    print "shortened", shortened + 0
    print "value", value + 0
    print "longest", longest + 0
}
