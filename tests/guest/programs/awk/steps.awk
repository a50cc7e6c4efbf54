# Reads `perf script -F ip` of samples of `track`, taken every PERIOD instructions. Where it is says how many it has
# executed, modulo LENGTH: the instruction before its loop, then those of the loop. Of these the last but one has two bytes
# and all in front of that have one.
#
#   exact N        samples where the program was as far as the period implies
#   one-late N     samples one instruction later
#   elsewhere N    samples anywhere else

{
    expected = (NR * PERIOD - 1) % LENGTH
    if (NR == 1)
        start = ("0x" $1) - expected
    position = ("0x" $1) - start
    if (position > LENGTH - 2)
        position--
    late = position - expected
    found[late == 0 ? "exact" : late == 1 ? "one-late" : "elsewhere"]++
}
END {
    print "exact", found["exact"] + 0
    print "one-late", found["one-late"] + 0
    print "elsewhere", found["elsewhere"] + 0
}
