# decode ENCODED: prints the arguments of an encoded command, quoted for this shell's `eval`.
# Commas separate arguments, and %XX stands for a byte.
decode() {
    rest=$1,
    while [ -n "$rest" ]; do
        argument=${rest%%,*}
        rest=${rest#*,}
        printf "'"
        while :; do
            case $argument in
            *%*)
                printf %s "${argument%%\%*}"
                argument=${argument#*%}
                byte=$((0x${argument%"${argument#??}"}))
                argument=${argument#??}
                # A quote must leave the quotes that it stands in.
                case $byte in
                39) printf "'\\\\''" ;;
                *) printf "\\$((byte / 64))$((byte / 8 % 8))$((byte % 8))" ;;
                esac
                ;;
            *)
                printf "%s' " "$argument"
                break
                ;;
            esac
        done
    done
}
