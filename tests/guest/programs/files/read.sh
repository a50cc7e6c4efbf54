# Runs in a guest, in a directory of a read-only share: reads files, tries changes, and follows links. A line with `==`
# begins the output of each part.
cd deep
echo "== folder"
pwd
echo "== mount"
grep virtiofs /proc/mounts
echo "== count"
perf stat -x, -o /tmp/count -e instructions:u ./loop
grep -o '^[0-9]*' /tmp/count
echo "== sum"
sha256sum ../big
try_changes() {
    for change in ': >new' 'echo x >>loop' 'rm loop' 'mv loop other' 'mkdir new' 'rmdir empty' 'chmod 777 loop' \
        'ln loop other' 'ln -s loop other' 'touch -c loop' 'truncate -s 0 loop'; do
        sh -c "$change" 2>&1
    done
}
echo "== changes"
try_changes
echo "== insisting"
# Now the guest's kernel lets them pass, and the host refuses them.
mount -o remount,rw /scenario/shared && try_changes
sync loop && stat -f . >/dev/null && echo served
echo "== links"
echo of-the-guest >/etc/whose
for link in absolute upwards chain etc folder/whose deep/empty/../../../whose; do
    cat ../$link 2>&1
done
ls ../folder
echo "== walk"
cd ..
inside=no gone=no rounds=0
# The guest caches directory entries for a second.
until [ $inside$gone = yesyes ] || [ $rounds -eq 50 ]; do
    cat moved/in/file 2>/dev/null && inside=yes || gone=yes
    cat moved/in/../whose moved/in/../../whose moved/link 2>/dev/null
    cd moved/in 2>/dev/null && { cat ../whose ../../whose 2>/dev/null; cd /scenario/shared; }
    find . -name whose
    sleep 1.1
    rounds=$((rounds + 1))
done
echo inside: $inside, gone: $gone
echo "== end"
exit 3
