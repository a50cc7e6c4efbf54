# Reads the output of `perf script -F ip` for samples of `track` that were taken every PERIOD instructions. The address
# of a sample tells how many instructions the program has executed, modulo LENGTH: one before its loop, then those of
# the loop. The last instruction but one of the loop has two bytes, and all before it have one. Prints:
#
#   exact N        number of samples at the instruction that the period implies
#   one-late N     number of samples one instruction later
#   elsewhere N    number of samples anywhere else

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
