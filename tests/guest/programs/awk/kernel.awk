# Reads `perf script -F period,ip,sym,iregs`, of samples taken every PERIOD events with the counter's value and the flags
# register. What perf calls their periods is how far the counter came from one to the next.
#
#   exact N         samples that were taken before the counter got to the next multiple of PERIOD
#   on SYMBOL N     samples there with interrupts on
#   off SYMBOL N    samples there with interrupts off

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
