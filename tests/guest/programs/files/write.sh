# Runs in a guest, in a writable share. Beside it are a read-only share, with a third share inside, and a writable one
# that the host removes. The host changes files meanwhile. The argument is the number of files to create at once. A line
# with `==` begins the output of each part, and tells the host when to make its change.
until_exists() { until [ -e "$1" ]; do sleep 0.1; done; }

echo "== folder"
pwd
echo "== nested"
cat ../outer/beside
echo made >../outer/new
echo made >../outer/inner/made
cat ../outer/inner/made
echo "== perf"
perf record -q -c 1000000 -e instructions:u -o perf.data ./loop
echo "== sum"
head -c 1000000 /dev/urandom >random
sha256sum random
echo "== many"
mkdir many
(cd many; touch $(seq $1))
ls many | wc -l
echo "== host counts"
until_exists counted
rm many/*
ls many | wc -l
echo "== too large"
dd if=/dev/zero of=large bs=1M count=6
rm large
echo "== mapped"
./mapped victim
echo status $?
echo "== doomed"
cat ../doomed/file
until_exists deleted
sleep 2
cat ../doomed/file
echo x >../doomed/new
ls ../doomed
echo listed $?
echo "== end"
exit 42
