# Reads the output of `perf script -F period,ip,sym,iregs` for samples that were taken every PERIOD events with the
# counter's value and the flags register. In this output a sample's period is the increase of the value since the sample
# before. Prints:
#
#   exact N         number of samples that were taken before the counter reached the next multiple of PERIOD
#   on SYMBOL N     number of samples in SYMBOL with interrupts on
#   off SYMBOL N    number of samples in SYMBOL with interrupts off

{
    value += $1
    exact += int(value / PERIOD) == NR
    flags = substr($NF, length("FLAGS:") + 1) + 0
    places[(and(flags, 0x200) ? "on " : "off ") $3]++
}
END {
    print "exact", exact + 0
    for (place in places)
        print place, places[place]
}
