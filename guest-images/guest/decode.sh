# decode ENCODED: prints the arguments of an encoded command, quoted for `eval`.
# Commas separate the arguments, and %XX stands for a byte.
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
                # A single quote has to be escaped outside of the quoted string.
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
