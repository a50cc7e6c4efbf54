# Reads `perf script -F ip,sym` of samples with callers.
#
#   FUNCTION<CALLER... N    samples there, called from there

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
