# Reads `perf script -D` of samples that have the counter's value in them, and compares their periods with what was counted
# from one to the next. Some of the kernel's interrupt handlers write the period into a sample that ends with it, others
# the one that begins there. The kernel looks for the right period from 1 on, and raises and rounds the first ones; so the
# comparison begins with the first of at least 1000.
#
#   compared N    intervals between samples
#   ended N       those as long as the period of the sample at their end
#   begun N       those as long as the period of the sample at their beginning
#   value N       the counter, at the last sample
#   longest N     the longest period

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
    print "value", value + 0
    print "longest", longest + 0
}
