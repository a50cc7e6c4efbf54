# Reads the output of `perf script -F ip,sym` for samples with call chains. Prints:
#
#   FUNCTION<CALLER... N    number of samples in FUNCTION with this chain of callers

BEGIN { RS = "" }
{
    chain = $2
    for (field = 4; field <= NF; field += 2)
        chain = chain "<" $field
    chains[chain]++
}
END {
    for (chain in chains)
        print chain, chains[chain]
}
